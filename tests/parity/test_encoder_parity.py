"""Our encoders against transformers' torch models: what those say is recorded by encoder_record.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from tests.extent import every_second

from prejit.compiler.checkpoint.checkpoint import open_encoder
from prejit.compiler.models import config_file, model_registry
from prejit.compiler.models.layers.product_forms import Forms, using
from prejit.compiler.models.parameters import with_parameters

from .encoder_cases import COUNT, REFERENCE, TOKENS, Case, cases
from .encoder_record import torch_result

TOLERANCE = 1e-4
COSINE = 0.9999

Values = np.ndarray[Any, np.dtype[np.float32]]


@pytest.fixture(scope="module")
def reference() -> dict[str, Values]:
    with np.load(REFERENCE) as recorded:
        return dict(recorded)


def ours(case: Case, directory: Path, padding: int = 0, forms: Forms | None = None) -> Values:
    """As torch_result; with more padding behind every row and a row without any token."""
    case.write(directory)
    out_in = forms is not None
    checkpoint = open_encoder(directory, out_in=out_in)
    source = config_file.load_encoder(directory)
    graph, state = nnx.split(model_registry.make_encoder(source, out_in=out_in))
    weights = {name: checkpoint.read(name) for name in checkpoint.names}
    tokens = np.pad(case.tokens, ((0, 1), (0, padding)), constant_values=5)
    length = np.append(case.lengths, np.int32(0))

    def run(weights: Any, tokens: jax.Array, length: jax.Array) -> jax.Array:
        module = nnx.merge(graph, with_parameters(state, weights))
        with using(forms):
            result: jax.Array = (module if case.pooling else module.hidden)(tokens, length)
        return result

    result = np.asarray(jax.jit(run)(weights, tokens, length))
    assert np.isfinite(result).all(), "a row of padding alone must not be NaN"
    result = result[:-1]
    if case.pooling:
        return result
    return result[:, :TOKENS] * (np.arange(TOKENS) < case.lengths[:, None])[..., None]


@pytest.mark.parametrize("case", every_second(cases()), ids=lambda case: case.name)
def test_results_equal_those_that_torch_gave(
    case: Case, reference: dict[str, Values], tmp_path: Path, forms: Forms | None
) -> None:
    expected = reference[case.name]
    found = ours(case, tmp_path, padding=5, forms=forms)
    assert np.abs(found - expected).max() <= TOLERANCE
    rows = expected.reshape(-1, expected.shape[-1]), found.reshape(-1, expected.shape[-1])
    norms = [np.linalg.norm(one, axis=1) for one in rows]
    real = norms[0] > 0
    cosine = (rows[0] * rows[1]).sum(1)[real] / (norms[0] * norms[1])[real]
    assert cosine.min() >= COSINE


def test_every_case_is_recorded_and_they_differ(reference: dict[str, Values]) -> None:
    assert list(reference) == [case.name for case in cases()]
    assert COUNT >= 10
    for name, values in reference.items():
        assert values.std() > 100 * TOLERANCE, f"{name}: a constant would pass"
    heads = [case.name for case in cases() if case.head]
    assert {name.partition("-")[0] for name in heads} == {"bert", "roberta", "distilbert"}


@pytest.mark.torch
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("case", every_second(cases()), ids=lambda case: case.name)
def test_the_record_equals_what_torch_gives_here(
    case: Case, reference: dict[str, Values], tmp_path: Path
) -> None:
    assert np.abs(torch_result(case, tmp_path) - reference[case.name]).max() <= TOLERANCE / 2
