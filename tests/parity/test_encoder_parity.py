"""Our encoders against transformers' torch models: what those say is recorded by encoder_record.py."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.extent import one_in

from prejit.compiler.lowering.encoder_programs import lower_encoder
from prejit.compiler.manifest.specs import ProgramSpec
from prejit.compiler.models import config_file, model_registry, quantizing
from prejit.compiler.models.families.rotary_encoders import derived_of
from prejit.compiler.models.layers.kernel_calls import Forms
from prejit.compiler.models.parameters import parameters_of
from prejit.compiler.native.products import INTEGERS, KERNEL_CALLS

from . import encoder_family_cases
from .encoder_cases import COUNT, REFERENCE, cases
from .encoder_family_cases import family_cases
from .encoder_record import torch_result
from .encoder_results import encoder_results, in_both_forms

REFERENCES = (REFERENCE, encoder_family_cases.REFERENCE)
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


def write(case, directory):
    """Write the checkpoint as torch's save_pretrained would."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(case.config))
    module = model_registry.make_encoder(config_file.load_encoder(directory), out_in=True)
    prefix = f"{module.name}."
    published = {
        name.removeprefix("" if case.scores else prefix): case.in_file(
            name.removeprefix(prefix), each.shape
        )
        for name, each in parameters_of(module).items()
        if name not in derived_of(module)
    }
    save_file(published, directory / "model.safetensors", metadata={"format": "pt"})


SAMPLE = {"deberta-v2", "modernbert", "nomic-bert", "qwen3"}


def is_sampled(case, form):
    """Return whether `make test` runs a case: embedders in one form, those that score in the other."""
    kind = case.name.removeprefix("scores-").removesuffix("-0")
    return kind in SAMPLE and case.scores == (form == "kernels")


@in_both_forms(family_cases(), is_sampled)
def test_results_of_more_families_equal_those_that_torch_gave(case, reference, tmp_path, forms):
    expected = reference[case.name]
    assert expected.std() > 100 * TOLERANCE, "a constant would pass"
    write(case, tmp_path / "model")
    given, lengths = case.given, case.lengths
    found = encoder_results(tmp_path / "model", given, lengths, forms, pooled=case.scores)
    assert np.abs(found - expected).max() <= TOLERANCE


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
    assert list(reference) == [case.name for case in (*cases(), *family_cases())]
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
