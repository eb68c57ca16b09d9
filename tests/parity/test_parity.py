"""Our models against transformers' torch models: what those say is recorded by record.py."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from prejit.compiler import models
from prejit.compiler.checkpoint import open_checkpoint

from .cases import PROMPT, REFERENCE, TOTAL, Case, cases
from .record import torch_logits

TOLERANCE = 1e-4
CONTEXT = 32

Logits = np.ndarray[Any, np.dtype[np.float32]]


class Model:
    """A checkpoint, ready to run row by row."""

    def __init__(self, directory: Path, context: int) -> None:
        checkpoint = open_checkpoint(directory)
        config = models.load_config(directory)
        self.shape = models.describe(config)
        self.graph, self.state = nnx.split(models.decoder(config))
        self.weights = {name: checkpoint.read(name) for name in checkpoint.names}
        self.context = context
        # Unoptimized code compiles in half the time, and the values must not depend on it.
        options = {"xla_backend_optimization_level": 0}
        self.step = jax.jit(self._step, donate_argnums=4, compiler_options=options)

    def _step(self, weights: Any, *arguments: Any) -> Any:
        return nnx.merge(self.graph, models.with_parameters(self.state, weights))(*arguments)

    def feed(self, chunks: list[np.ndarray[Any, Any]], block: int) -> Iterator[Logits]:
        """Logits [V] after each chunk; a chunk of more than one token is padded to a block."""
        size = (1, self.shape.num_kv_heads, self.context, self.shape.head_size)
        empty = np.zeros(size, np.float32)
        cache = tuple((empty, empty) for _ in range(self.shape.num_layers))
        start = 0
        for chunk in chunks:
            tokens = np.zeros((1, 1 if len(chunk) == 1 else block), np.int32)
            tokens[0, : len(chunk)] = chunk
            place = np.array([start], np.int32), np.array([len(chunk)], np.int32)
            logits, cache = self.step(self.weights, tokens, *place, cache)
            start += len(chunk)
            yield np.asarray(logits[0])


@pytest.fixture(scope="module")
def reference() -> dict[str, Logits]:
    with np.load(REFERENCE) as recorded:
        return dict(recorded)


def ours(directory: Path, tokens: np.ndarray[Any, Any]) -> Logits:
    """Float32 [TOTAL - PROMPT + 1, V]: prefill in one padded piece, then decode steps."""
    chunks = [tokens[:PROMPT], *tokens[PROMPT:, None]]
    return np.stack(list(Model(directory, CONTEXT).feed(chunks, block=PROMPT + 3)))


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_logits_equal_those_that_torch_gave(
    case: Case, reference: dict[str, Logits], tmp_path: Path
) -> None:
    case.write(tmp_path)
    assert np.abs(ours(tmp_path, case.tokens) - reference[case.name]).max() <= TOLERANCE


def test_every_case_is_recorded_and_they_differ(reference: dict[str, Logits]) -> None:
    assert list(reference) == [case.name for case in cases()]
    assert sum(name.startswith("gpt2") for name in reference) >= 20
    assert sum(name.startswith("llama") for name in reference) >= 20
    for name, logits in reference.items():
        assert logits.shape[0] == TOTAL - PROMPT + 1
        assert logits.std(0).min() > 100 * TOLERANCE, f"{name}: a constant would pass"


@pytest.mark.torch
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_the_record_equals_what_torch_gives_here(
    case: Case, reference: dict[str, Logits], tmp_path: Path
) -> None:
    assert np.abs(torch_logits(case, tmp_path) - reference[case.name]).max() <= TOLERANCE / 2


@pytest.fixture(scope="module")
def stories() -> Path:
    shared = Path(os.environ.get("PREJIT_SHARED", Path(__file__).parents[2] / "../shared"))
    directory = shared / "data" / "stories260k"
    if not directory.is_dir():
        pytest.skip(
            f"no {directory}; PREJIT_SHARED names the directory that holds data/stories260k"
        )
    return directory


def test_a_trained_llama_writes_its_published_text(stories: Path) -> None:
    expected = json.loads((stories / "expected.json").read_text())
    prompt, published = expected["prompt_ids"], expected["ids"]
    model = Model(stories, context=256)
    tokens = np.array([*prompt, *published[:-1]], np.int32)[:, None]
    greedy = [int(logits.argmax()) for logits in model.feed(list(tokens), block=1)]
    assert len(published) == 200
    assert greedy[len(prompt) - 1 :] == published
