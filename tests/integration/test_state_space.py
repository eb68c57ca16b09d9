"""Decoders of the user write what a plain loop over their code writes, whatever else the engine does.

The models are those of the examples: one with a state, of which nothing can be taken back, and one with keys,
values and experts. test_invariance.py has the first one beside others in every way to generate.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import shutil
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.once import Once

import prejit.compiler
from prejit.compiler import Generate, Manifest, Model
from prejit.runtime import Bundle, FallbackWarning, Fingerprint, load
from prejit.runtime.errors import ManifestError
from prejit.runtime.generation import decode

from .conftest import ROOT, Run

SIZES = {  # few, because each is a compilation more
    "state_space": "batch = [1, 3]\nprompt = [4, 8]\ncontext = [72]\ndraft_tokens = 3",
    "mixture_of_experts": "batch = [2]\nprompt = [8]\ncontext = [24, 72]\ndraft_tokens = 3",
}
VOCABULARY, LONGEST_CHUNK, CONTEXT = 512, 8, 72
MANIFEST = """
[bundle]
name = "{name}"
[model]
module = "model:model"
[generate]
{sizes}
[[target]]
name = "cpu-host"
"""
TEXTS = np.random.default_rng(0).integers(0, VOCABULARY, (6, CONTEXT)).tolist()


@functools.cache
def example_model(example: str) -> Any:
    """The model of an example; both are in modules named `model`."""
    spec = importlib.util.spec_from_file_location(example, ROOT / "examples" / example / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[example] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module.model


@dataclass
class Plain:
    """A model in a plain loop: one row, one token a call, one cache from its first token to its last."""

    model: Any
    known: dict[tuple[int, ...], tuple[Any, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.step = jax.jit(self.model.__call__)

    def after(self, text: Sequence[int]) -> tuple[Any, Any]:
        """Logits [V] after a text, and its cache. The texts that it begins with are remembered."""
        key = tuple(text)
        if not key:
            return None, self.model.make_cache(1, CONTEXT, "float32")
        if key not in self.known:
            _, cache = self.after(key[:-1])
            place = jnp.array([len(key) - 1], jnp.int32)
            one = jnp.ones(1, jnp.int32)
            logits, cache = self.step(jnp.array([[key[-1]]], jnp.int32), place, one, cache)
            self.known[key] = np.asarray(logits[0]), cache
        return self.known[key]

    def writes(self, prompt: Sequence[int], count: int) -> list[int]:
        """The tokens that follow a prompt."""
        text = list(prompt)
        for _ in range(count):
            text.append(int(self.after(text)[0].argmax()))
        return text[len(prompt) :]


def build(run: Run, directory: Path, example: str) -> Path:
    """Build an example's model in float32, with other sizes."""
    shutil.copy(ROOT / "examples" / example / "model.py", directory)
    manifest = directory / "manifest.toml"
    manifest.write_text(MANIFEST.format(name=example, sizes=SIZES[example]))
    run("build", manifest, "-o", directory, quick=True)
    return directory / example


@pytest.fixture(scope="module")
def paths(run: Run, once: Once) -> Callable[[str], Path]:
    """The bundle of an example, in float32."""
    return lambda example: example_bundle(run, once, example)


def example_bundle(run: Run, once: Once, example: str) -> Path:
    made = once(example, lambda at: build(run, at, example))
    return made / example


@dataclass(frozen=True)
class Subject:
    """A bundle and its model in a plain loop."""

    example: str
    bundle: Bundle
    plain: Plain

    @property
    def has_state(self) -> bool:
        return self.example == "state_space"


@pytest.fixture(
    scope="module",
    params=["state_space", pytest.param("mixture_of_experts", marks=pytest.mark.thorough)],
)
def subject(request: pytest.FixtureRequest, paths: Callable[[str], Path]) -> Subject:
    bundle = load(paths(request.param), on_mismatch="error")
    return Subject(request.param, bundle, Plain(example_model(request.param)))


@pytest.fixture(params=[1, 4])
def steps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The most steps of a decode call, which otherwise depend on how long a step takes."""
    most: int = request.param
    monkeypatch.setattr(decode, "steps_per_call", lambda _, left: min(left, most))
    return most


def test_prompts_of_every_length_are_cut_into_chunks(subject: Subject) -> None:
    for length in range(1, 3 * LONGEST_CHUNK + 1):
        prompt = TEXTS[0][:length]
        found = subject.bundle.generate(prompt, max_new_tokens=4)
        assert list(found.token_ids) == subject.plain.writes(prompt, 4), length
    assert len(set(subject.plain.writes(TEXTS[0][:9], 4))) > 2, "a text that says something"


def test_a_session_computes_only_what_is_new(subject: Subject) -> None:
    session, plain = subject.bundle.session(), subject.plain
    text = TEXTS[2][:10]
    for reused in (0, 10 + 6 - 1):  # the last token has not been fed back
        found = session.generate(text, max_new_tokens=6)
        assert list(found.token_ids) == plain.writes(text, 6)
        assert found.stats.reused_tokens == reused
        text = [*text, *found.token_ids, 5, 6, 7]
    again = session.generate(text[:12], max_new_tokens=3)
    assert list(again.token_ids) == plain.writes(text[:12], 3)
    assert again.stats.reused_tokens == (0 if subject.has_state else 11), "a state cannot go back"


def test_a_stop_token_in_the_middle_of_a_call(subject: Subject, steps: int) -> None:
    """The call goes on behind it, and its state is of no text."""
    session, plain = subject.bundle.session(), subject.plain
    prompt = TEXTS[4][:7]
    written = plain.writes(prompt, 12)
    # The first token comes from the prefill, and four from a call: those at 4 and 8 are the last of one.
    stop = next(place for place in (3, 5, 6, 7) if written[place] not in written[:place])
    found = session.generate(prompt, max_new_tokens=12, stop_token_ids=[written[stop]])
    assert list(found.token_ids) == written[:stop]
    text = [*prompt, *written[:stop], 5, 6]
    following = session.generate(text, max_new_tokens=6)
    assert list(following.token_ids) == plain.writes(text, 6)
    is_exact = not subject.has_state or steps == 1
    assert following.stats.reused_tokens == (len(text) - 2 if is_exact else 0)


def test_a_prefix_serves_what_its_state_can_continue(subject: Subject) -> None:
    bundle, plain = subject.bundle, subject.plain
    text = TEXTS[3]
    prefix = bundle.prefix(text[:20])
    found = bundle.generate(text[:29], prefix=prefix, max_new_tokens=5)
    assert list(found.token_ids) == plain.writes(text[:29], 5)
    assert found.stats.reused_tokens == 20
    elsewhere = [*text[:13], *TEXTS[4][:9]]  # leaves the prefix before its end
    found = bundle.generate(elsewhere, prefix=prefix, max_new_tokens=5)
    assert list(found.token_ids) == plain.writes(elsewhere, 5)
    assert found.stats.reused_tokens == (0 if subject.has_state else 13)
    same = bundle.generate(text[:20], prefix=prefix, max_new_tokens=5)
    assert list(same.token_ids) == plain.writes(text[:20], 5)


def test_another_machine_compiles_the_same_text(paths: Callable[[str], Path]) -> None:
    other = dataclasses.replace(Fingerprint.current(), jaxlib="0.4.0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        bundle = load(paths("state_space"), fingerprint=other)
        found = bundle.generate(TEXTS[0][:13], max_new_tokens=9)
    assert list(found.token_ids) == Plain(example_model("state_space")).writes(TEXTS[0][:13], 9)


def test_one_context_is_enough_for_a_cache_without_positions(tmp_path: Path) -> None:
    manifest = Manifest(
        "m",
        model=Model(module=example_model("state_space")),
        generate=Generate(batch=(1,), prompt=(8,), context=(64, 4096)),
        targets=["cpu-host"],
    )
    with pytest.raises(ManifestError) as caught:
        prejit.compiler.build(manifest, tmp_path, cache=tmp_path / "cache", quiet=True)
    assert str(caught.value) == (
        "manifest 'm': generate.context: expected one size, because the cache of StateSpaceModel has no "
        "positions and is as large for any; found [64, 4096]"
    )
    assert caught.value.hint == "give the longest text that you want to allow: context = [4096]"
