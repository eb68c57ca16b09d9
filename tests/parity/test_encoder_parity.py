"""Our encoders against transformers' torch models: what those say is recorded by encoder_record.py."""

import numpy as np
import pytest
from tests.extent import one_in

from prejit.compiler.lowering.encoder_programs import lower_encoder
from prejit.compiler.manifest.specs import ProgramSpec
from prejit.compiler.models import config_file, model_registry, quantizing
from prejit.compiler.models.layers.product_forms import Forms
from prejit.compiler.native.products import INTEGERS, KERNEL_CALLS

from .encoder_cases import COUNT, REFERENCE, cases
from .encoder_record import torch_result
from .encoder_results import encoder_results

REFERENCES = (REFERENCE,)
TOLERANCE = 1e-4
COSINE = 0.9999


@pytest.mark.parametrize("case", one_in(6, cases()), ids=lambda case: case.name)
def test_results_equal_those_that_torch_gave(case, reference, tmp_path, forms):
    expected = reference[case.name]
    case.write(tmp_path)
    pooled = bool(case.pooling)
    found = encoder_results(tmp_path, case.tokens, case.lengths, forms, pooled=pooled)
    assert np.abs(found - expected).max() <= TOLERANCE
    if pooled:
        packed = encoder_results(
            tmp_path, case.tokens, case.lengths, forms, pooled=True, packed=True
        )
        assert np.abs(packed - found).max() <= 1e-5
    rows = expected.reshape(-1, expected.shape[-1]), found.reshape(-1, expected.shape[-1])
    norms = [np.linalg.norm(one, axis=1) for one in rows]
    real = norms[0] > 0
    cosine = (rows[0] * rows[1]).sum(1)[real] / (norms[0] * norms[1])[real]
    assert cosine.min() >= COSINE


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_layers_round_tokens_beside_int8_matrices_alone(dtype, tmp_path):
    cases()[0].write(tmp_path)
    module = model_registry.make_encoder(config_file.load_encoder(tmp_path), out_in=True)
    quantizing.store(module, dtype)
    spec, forms = ProgramSpec("encode/b2-t8/layer", "layer", {"batch": 2, "length": 8}), Forms()
    program = lower_encoder(module, spec, forms)
    calls = KERNEL_CALLS["linear_integers"].encode() in program.portable
    chosen = {forms.form(each) for each in forms.met}
    assert calls == (chosen == {INTEGERS}) == (dtype == "int8")


def test_every_case_is_recorded_and_they_differ(reference):
    assert list(reference) == [case.name for case in cases()]
    assert COUNT >= 10
    for name, values in reference.items():
        assert values.std() > 100 * TOLERANCE, f"{name}: a constant would pass"
    heads = [case.name for case in cases() if case.head]
    assert {name.partition("-")[0] for name in heads} == {"bert", "roberta", "distilbert"}


@pytest.mark.torch
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("case", one_in(6, cases()), ids=lambda case: case.name)
def test_the_record_equals_what_torch_gives_here(case, reference, tmp_path):
    assert np.abs(torch_result(case, tmp_path) - reference[case.name]).max() <= TOLERANCE / 2
