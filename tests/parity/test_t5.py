"""Our T5 against transformers' torch model: what that says is recorded by t5_record.py."""

from __future__ import annotations

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
from prejit.compiler.models.families import encoder_decoders
from prejit.compiler.models.layers.product_forms import Forms, using
from prejit.compiler.models.parameters import with_parameters

from .record import TIE, nearest_tokens
from .t5_cases import COUNT, PROMPT, REFERENCE, ROWS, STEPS, Case, cases, has_own_head
from .t5_record import torch_logits

TOLERANCE = 1e-4
CONTEXT = 40
PADDING = 3
"""Places behind every source and prompt, with tokens that count for nothing."""

Logits = np.ndarray[Any, np.dtype[np.float32]]


@pytest.fixture(scope="module")
def reference() -> dict[str, Logits]:
    with np.load(REFERENCE) as recorded:
        return dict(recorded)


def ours(case: Case, directory: Path, greedy: np.ndarray[Any, Any], forms: Forms | None) -> Logits:
    """As torch_logits, for the text of these greedy tokens: one encoded batch, a prefill, decode steps."""
    case.write(directory)
    out_in = forms is not None
    checkpoint = open_checkpoint(directory, out_in=out_in)
    config = config_file.load_config(directory)
    graph, state = nnx.split(model_registry.make_decoder(config, out_in=out_in))
    weights = {name: checkpoint.read(name) for name in checkpoint.names}

    @jax.jit  # one program of all, which compiles sooner than three
    def run(weights: Any, source: Any, lengths: Any, prompt: Any, length: Any, next_: Any) -> Any:
        with using(forms):
            model = nnx.merge(graph, with_parameters(state, weights))
            cache = model.encode(source, lengths, CONTEXT, "float32")
            first, cache = model(prompt, jnp.zeros_like(length), length, cache)

            def decode(state: Any, token: Any) -> Any:
                position, cache = state
                logits, cache = model(token[:, None], position, jnp.ones_like(length), cache)
                return (position + 1, cache), logits

            _, others = jax.lax.scan(decode, (length, cache), next_)
            return jnp.concatenate([first[None], others]).swapaxes(0, 1)

    beyond = ((0, 0), (0, PADDING))
    source, prompt = (np.pad(x, beyond, constant_values=5) for x in (case.source, case.prompt))
    length = np.full(ROWS, PROMPT, np.int32)
    return np.asarray(run(weights, source, case.lengths, prompt, length, greedy.astype(np.int32)))


named = pytest.mark.parametrize("case", every_second(cases()), ids=lambda case: case.name)


@named
def test_logits_and_greedy_tokens_equal_those_that_torch_gave(
    case: Case, reference: dict[str, Logits], tmp_path: Path, forms: Forms | None
) -> None:
    torch = reference[case.name]
    found = ours(case, tmp_path, torch[:, :-1].argmax(2).T, forms)
    assert found.argmax(2).tolist() == torch.argmax(2).tolist()
    assert np.abs(found - torch).max() <= TOLERANCE


def test_every_case_is_recorded_and_they_differ(reference: dict[str, Logits]) -> None:
    assert list(reference) == [case.name for case in cases()]
    assert COUNT >= 10
    for name, logits in reference.items():
        assert logits.shape[:2] == (ROWS, STEPS)
        for row in logits:
            assert row.std(0).min() > 10 * TOLERANCE, f"{name}: a constant would pass"
            assert nearest_tokens(row) >= TIE, f"{name}: rounding decides a token"
    kinds = {(case.old, has_own_head(case.config), "gated" in case.name) for case in cases()}
    assert len(kinds) >= 6


@pytest.mark.torch
@pytest.mark.filterwarnings("default")
@named
def test_the_record_equals_what_torch_gives_here(
    case: Case, reference: dict[str, Logits], tmp_path: Path
) -> None:
    assert np.abs(torch_logits(case, tmp_path) - reference[case.name]).max() <= TOLERANCE / 2


@pytest.mark.torch
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("count", "farthest"), [(32, 128), (32, 1000), (8, 20), (7, 5), (64, 256)])
def test_buckets_are_those_of_torch(count: int, farthest: int, *, causal: bool) -> None:
    import torch
    from transformers.models.t5.modeling_t5 import T5Attention

    distance = np.arange(-1500, 1501)
    expected = T5Attention._relative_position_bucket(
        torch.from_numpy(distance), not causal, count, farthest
    )
    assert np.array_equal(
        encoder_decoders.buckets(distance, count, farthest, causal=causal), expected.numpy()
    )
