"""Our encoders of each family against transformers' torch models: encoder_family_record.py recorded them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.extent import sampled

from prejit.compiler.models import config_file, model_registry
from prejit.compiler.models.families.rotary_encoders import derived_of
from prejit.compiler.models.layers.product_forms import Forms
from prejit.compiler.models.parameters import parameters_of

from .encoder_family_cases import REFERENCE, FamilyCase, family_cases
from .encoder_results import Values, encoder_results

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def reference() -> dict[str, Values]:
    with np.load(REFERENCE) as recorded:
        return dict(recorded)


def write(case: FamilyCase, directory: Path) -> None:
    """Write the checkpoint as torch's save_pretrained would."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(case.config))
    module = model_registry.make_encoder(config_file.load_encoder(directory), out_in=True)
    prefix = f"{module.name}."
    published = {
        name.removeprefix("" if case.scores else prefix): case.published(
            name.removeprefix(prefix), each.shape
        )
        for name, each in parameters_of(module).items()
        if name not in derived_of(module)
    }
    save_file(published, directory / "model.safetensors", metadata={"format": "pt"})


SAMPLE = {"deberta-v2", "modernbert", "nomic-bert", "qwen3"}


def is_sampled(case: FamilyCase, form: str) -> bool:
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
def test_results_of_more_families_equal_those_that_torch_gave(
    case: FamilyCase, reference: dict[str, Values], tmp_path: Path, forms: Forms | None
) -> None:
    expected = reference[case.name]
    assert expected.std() > 100 * TOLERANCE, "a constant would pass"
    write(case, tmp_path / "model")
    given, lengths = case.given, case.lengths
    found = encoder_results(tmp_path / "model", given, lengths, forms, pooled=case.scores)
    assert np.abs(found - expected).max() <= TOLERANCE


def test_every_case_is_recorded(reference: dict[str, Values]) -> None:
    assert list(reference) == [case.name for case in family_cases()]
