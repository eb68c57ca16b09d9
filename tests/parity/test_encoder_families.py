"""Our encoders of each family against transformers' torch models: encoder_record.py recorded them."""

import itertools
import json

import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.extent import sampled

from prejit.compiler.models import config_file, model_registry
from prejit.compiler.models.families.rotary_encoders import derived_of
from prejit.compiler.models.parameters import parameters_of

from .encoder_family_cases import REFERENCE, family_cases
from .encoder_results import encoder_results

REFERENCES = (REFERENCE,)
TOLERANCE = 1e-4


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


@pytest.mark.parametrize(
    ("case", "forms"),
    sampled(
        list(itertools.product(family_cases(), ["portable", "kernels"])),
        lambda each: is_sampled(*each),
    ),
    indirect=["forms"],
    ids=lambda each: getattr(each, "name", each),
)
def test_results_of_more_families_equal_those_that_torch_gave(case, reference, tmp_path, forms):
    expected = reference[case.name]
    assert expected.std() > 100 * TOLERANCE, "a constant would pass"
    write(case, tmp_path / "model")
    given, lengths = case.given, case.lengths
    found = encoder_results(tmp_path / "model", given, lengths, forms, pooled=case.scores)
    assert np.abs(found - expected).max() <= TOLERANCE


def test_every_case_is_recorded(reference):
    assert list(reference) == [case.name for case in family_cases()]
