"""Our models against transformers' torch models: what those say is recorded by record.py."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from prejit.compiler.checkpoint.checkpoint import open_checkpoint
from prejit.compiler.models import config_file, registry
from prejit.compiler.models.layers.forms import Forms, using
from prejit.compiler.models.parameters import with_parameters

from .cases import PROMPT, REFERENCE, STEPS, Case, cases
from .record import TIE, nearest_tokens, torch_logits

TOLERANCE = 1e-4
CONTEXT = 96

Logits = np.ndarray[Any, np.dtype[np.float32]]


class Model:
    """A checkpoint, ready to run row by row in a context."""

    def __init__(self, directory: Path, context: int, forms: Forms | None = None) -> None:
        out_in = forms is not None
        checkpoint = open_checkpoint(directory, out_in=out_in)
        config = config_file.load_config(directory)
        self.shape = registry.describe(config)
        self.graph, self.state = nnx.split(registry.make_decoder(config, context, out_in=out_in))
        self.forms = forms
        self.weights = {name: checkpoint.read(name) for name in checkpoint.names}
        self.context = context
        self.step = jax.jit(self._step, donate_argnums=4)

    def _step(self, weights: Any, *arguments: Any) -> Any:
        with using(self.forms):
            return self._run(weights, *arguments)

    def _run(self, weights: Any, *arguments: Any) -> Any:
        return nnx.merge(self.graph, with_parameters(self.state, weights))(*arguments)

    def feed(self, chunks: Iterable[np.ndarray[Any, Any]], block: int) -> Iterator[Logits]:
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

    def follow(self, prompt: np.ndarray[Any, Any], greedy: np.ndarray[Any, Any]) -> Logits:
        """Float32 [1 + len(greedy), V]: prefill in one padded piece, then decode steps."""
        chunks = [prompt, *greedy.astype(np.int32)[:, None]]
        return np.stack(list(self.feed(chunks, block=PROMPT + 3)))


@pytest.fixture(scope="module")
def reference() -> dict[str, Logits]:
    with np.load(REFERENCE) as recorded:
        return dict(recorded)


def assert_equal(ours: Logits, torch: Logits) -> None:
    """The same greedy token after every step, so the same text; the same logits."""
    assert ours.argmax(1).tolist() == torch.argmax(1).tolist()
    assert np.abs(ours - torch).max() <= TOLERANCE


def named(chosen: Iterable[Case]) -> Any:
    return pytest.mark.parametrize("case", list(chosen), ids=lambda case: case.name)


@named(case for case in cases() if case.switch is None)
def test_logits_and_greedy_tokens_equal_those_that_torch_gave(
    case: Case, reference: dict[str, Logits], tmp_path: Path, forms: Forms | None
) -> None:
    case.write(tmp_path)
    torch = reference[case.name]
    ours = Model(tmp_path, CONTEXT, forms).follow(case.prompt, torch[:-1].argmax(1))
    assert_equal(ours, torch)


@named(case for case in cases() if case.switch is not None)
def test_longrope_equals_torch_up_to_its_context_where_programs_end_there_and_after_it_where_not(
    case: Case, reference: dict[str, Logits], tmp_path: Path
) -> None:
    assert case.switch is not None
    case.write(tmp_path)
    torch = reference[case.name]
    greedy, within = torch[:-1].argmax(1), case.switch - PROMPT + 1
    short = Model(tmp_path, case.switch).follow(case.prompt, greedy[: within - 1])
    assert_equal(short, torch[:within])
    long = Model(tmp_path, CONTEXT).follow(case.prompt, greedy)
    assert_equal(long[within:], torch[within:])
    assert np.abs(long[:within] - torch[:within]).max() > 100 * TOLERANCE


def test_every_case_is_recorded_and_they_differ(reference: dict[str, Logits]) -> None:
    assert list(reference) == [case.name for case in cases()]
    families = Counter(name.split("-")[0] for name in reference)
    known = {family.removesuffix("_text") for family in registry.DECODERS}
    assert families.keys() == known
    assert min(families.values()) >= 10
    for name, logits in reference.items():
        assert logits.shape[0] == STEPS
        assert logits.std(0).min() > 10 * TOLERANCE, f"{name}: a constant would pass"
        assert nearest_tokens(logits) >= TIE, f"{name}: rounding decides a token"


@pytest.mark.torch
@pytest.mark.filterwarnings("default")
@named(cases())
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


def test_a_trained_llama_writes_its_published_text(stories: Path, forms: Forms | None) -> None:
    expected = json.loads((stories / "expected.json").read_text())
    prompt, published = expected["prompt_ids"], expected["ids"]
    model = Model(stories, 256, forms)
    tokens = np.array([*prompt, *published[:-1]], np.int32)[:, None]
    greedy = [int(logits.argmax()) for logits in model.feed(list(tokens), block=1)]
    assert len(published) == 200
    assert greedy[len(prompt) - 1 :] == published
