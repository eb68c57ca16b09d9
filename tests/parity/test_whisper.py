"""Our Whisper against transformers' torch model: what that says is recorded by whisper_record.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tests.extent import every_second

from prejit.compiler.checkpoint.checkpoint import open_checkpoint
from prejit.compiler.models import config_file, model_registry
from prejit.compiler.models.layers.product_forms import Forms, using
from prejit.compiler.models.parameters import with_parameters

from .record import TIE, nearest_tokens
from .whisper_cases import COUNT, PROMPT, REFERENCE, ROWS, STEPS, Case, cases
from .whisper_record import torch_logits

TOLERANCE = 1e-4
CONTEXT = PROMPT + STEPS

Logits = np.ndarray[Any, np.dtype[np.float32]]


def named(chosen: Iterable[Case]) -> Any:
    return pytest.mark.parametrize("case", every_second(chosen), ids=lambda case: case.name)


@pytest.fixture(scope="module")
def reference() -> dict[str, Logits]:
    with np.load(REFERENCE) as recorded:
        return dict(recorded)


def compiled(
    case: Case, directory: Path, greedy: Any, forms: Forms | None
) -> Callable[[Logits], Logits]:
    """The logits of sources, [ROWS, STEPS, V]: encode, prefill in one padded piece, then decode steps."""
    case.write(directory)
    out_in = forms is not None
    checkpoint = open_checkpoint(directory, out_in=out_in)
    config = config_file.load_config(directory)
    graph, state = nnx.split(model_registry.make_decoder(config, CONTEXT, out_in=out_in))
    weights = {name: checkpoint.read(name) for name in checkpoint.names}
    padded = np.pad(case.prompts, ((0, 0), (0, 3)), constant_values=5)
    ones = np.ones(ROWS, np.int32)

    @jax.jit  # one program, which compiles sooner than three
    def run(weights: Any, source: Any, prompts: Any, following: Any) -> Any:
        module = nnx.merge(graph, with_parameters(state, weights))
        with using(forms):
            cache = module.encode(source, source.shape[2] * ones, CONTEXT, "float32")
            first, cache = module(prompts, 0 * ones, PROMPT * ones, cache)

            def decode(state: Any, tokens: Any) -> Any:
                position, cache = state
                logits, cache = module(tokens[:, None], position, ones, cache)
                return (position + 1, cache), logits

            _, others = jax.lax.scan(decode, (jnp.asarray(PROMPT * ones), cache), following)
        return jnp.concatenate([first[None], others]).swapaxes(0, 1)

    following = greedy.T.astype(np.int32)
    return lambda source: np.asarray(run(weights, source, padded, following))


@named(cases())
def test_logits_and_greedy_tokens_equal_those_that_torch_gave(
    case: Case, reference: dict[str, Logits], tmp_path: Path, with_kernels: Forms
) -> None:
    check(case, reference, tmp_path, with_kernels)


@named(cases()[:5])  # what a configuration changes is the same code in both forms
def test_the_portable_form_gives_the_same(
    case: Case, reference: dict[str, Logits], tmp_path: Path
) -> None:
    check(case, reference, tmp_path, None)


def check(case: Case, reference: dict[str, Logits], at: Path, forms: Forms | None) -> None:
    torch = reference[case.name]
    run = compiled(case, at, torch[:, :-1].argmax(2), forms)
    ours, swapped = run(case.spectrograms), run(case.spectrograms[::-1])
    assert ours.argmax(2).tolist() == torch.argmax(2).tolist()
    assert np.abs(ours - torch).max() <= TOLERANCE
    assert np.abs(swapped - torch).max(2).min() > 100 * TOLERANCE, "a decoder alone would pass"


def test_every_case_is_recorded_and_they_differ(reference: dict[str, Logits]) -> None:
    assert list(reference) == [case.name for case in cases()]
    assert COUNT >= 10
    for name, logits in reference.items():
        assert logits.shape[:2] == (ROWS, STEPS)
        assert logits.std(1).min() > 10 * TOLERANCE, f"{name}: a constant would pass"
        assert min(map(nearest_tokens, logits)) >= TIE, f"{name}: rounding decides a token"


@pytest.mark.torch
@pytest.mark.filterwarnings("default")
@named(cases())
def test_the_record_equals_what_torch_gives_here(
    case: Case, reference: dict[str, Logits], tmp_path: Path
) -> None:
    assert np.abs(torch_logits(case, tmp_path) - reference[case.name]).max() <= TOLERANCE / 2
