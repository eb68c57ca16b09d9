"""Our encoders of each family against transformers' torch models: encoder_family_record.py recorded them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file
from tests.extent import sampled

from prejit.compiler.checkpoint.checkpoint import open_encoder
from prejit.compiler.models import config_file, model_registry, quantizing
from prejit.compiler.models.families.rotary_encoders import derived_of
from prejit.compiler.models.layers.product_forms import Forms, using
from prejit.compiler.models.parameters import parameters_of, with_parameters

from .encoder_family_cases import REFERENCE, TOKENS, FamilyCase, family_cases

TOLERANCE = 1e-4

Values = np.ndarray[Any, np.dtype[np.float32]]


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


def ours(
    case: FamilyCase, directory: Path, forms: Forms | None = None, dtype: str = "float32"
) -> Values:
    """As torch_result; with more padding behind every row and a row without any token."""
    write(case, directory)
    out_in = forms is not None
    checkpoint = open_encoder(directory, out_in=out_in)
    source = config_file.load_encoder(directory)
    module = model_registry.make_encoder(source, dtype, out_in=out_in)
    graph, state = nnx.split(module)
    packed = quantizing.readers(module, checkpoint.rows)
    weights = {name: checkpoint.read(name) for name in checkpoint.names}
    weights |= {name: read() for name, read in packed.items()}
    tokens = np.pad(case.given, ((0, 1), (0, 5)), constant_values=1)
    length = np.append(case.lengths, np.int32(0))

    def run(weights: Any, tokens: jax.Array, length: jax.Array) -> jax.Array:
        model = nnx.merge(graph, with_parameters(state, weights))
        with using(forms):
            result: jax.Array = (model if case.scores else model.hidden)(tokens, length)
        return result

    result = np.asarray(jax.jit(run)(weights, tokens, length))
    assert np.isfinite(result).all(), "a row of padding alone must not be NaN"
    result = result[:-1]
    if case.scores:
        return result
    return result[:, :TOKENS] * (np.arange(TOKENS) < case.lengths[:, None])[..., None]


def is_sampled(case: FamilyCase, form: str) -> bool:
    """Whether `make test` has a case: embedders are sampled in one form, those that score in the other."""
    return case.name.endswith("-0") and case.scores == (form == "kernels")


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
    found = ours(case, tmp_path / "model", forms)
    assert np.abs(found - expected).max() <= TOLERANCE


def test_every_case_is_recorded(reference: dict[str, Values]) -> None:
    assert list(reference) == [case.name for case in family_cases()]
