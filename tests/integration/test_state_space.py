"""Decoders of the user write what a plain loop over their code writes, whatever else the engine does.

The models are those of the examples: one with a state, of which nothing can be taken back, and one with keys,
values and experts.
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

import prejit.compiler
from prejit.compiler import Generate, Manifest, Model
from prejit.compiler.lowering.sampling_programs import SamplingInputs, sample
from prejit.compiler.lowering.user.modules import UserModules
from prejit.compiler.lowering.user.own_decoder import find_model
from prejit.runtime import Bundle, FallbackWarning, Fingerprint, Sampling, load
from prejit.runtime.errors import ManifestError
from prejit.runtime.generation import decode
from prejit.runtime.generation.batch import Batch
from prejit.runtime.generation.options import Request
from prejit.runtime.generation.rows import Token
from prejit.runtime.generation.sampling import arrays, bias_row, history_row
from prejit.server.engine.engine import Engine

from .conftest import ROOT, Run

SIZES = {  # few, because each is a compilation more
    "state_space": "batch = [1, 3]\nprompt = [4, 8]\ncontext = [64]\ndraft_tokens = 3",
    "mixture_of_experts": "batch = [2]\nprompt = [8]\ncontext = [24, 64]\ndraft_tokens = 3",
}
VOCABULARY, LONGEST_CHUNK, CONTEXT = 512, 8, 64
MANIFEST = """
[bundle]
name = "{name}"
[model]
module = "model:model"
dtype = "{dtype}"
[generate]
{sizes}
[[target]]
name = "cpu-host"
"""
TEXTS = np.random.default_rng(0).integers(0, VOCABULARY, (6, CONTEXT)).tolist()
FEW = {7: 100.0, 90: 100.0, 301: 100.0}
"""A bias towards three tokens. Their text repeats itself by chance, so drafts are often right and wrong."""


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

    def writes(
        self,
        prompt: Sequence[int],
        count: int,
        sampling: Sampling | None = None,
        mask: Callable[[Sequence[int]], Any] | None = None,
    ) -> list[int]:
        """The tokens that follow a prompt."""
        text = list(prompt)
        for _ in range(count):
            logits = self.after(text)[0]
            generated = text[len(prompt) :]
            bias = np.zeros(VOCABULARY, np.float32)
            if sampling is not None:
                bias += bias_row(sampling, VOCABULARY)
            if mask is not None and (allowed := mask(generated)) is not None:
                bias[~allowed] = -np.inf
            if sampling is None or (not sampling.temperature and not sampling.needs_history):
                text.append(int((logits + bias).argmax()))
            else:
                history = history_row(prompt, generated, VOCABULARY)
                text.append(drawn(logits, sampling, bias, history, len(text)))
        return text[len(prompt) :]


_sample = jax.jit(sample)


def drawn(logits: Any, sampling: Sampling, bias: Any, history: Any, position: int) -> int:
    given = {**arrays([sampling], VOCABULARY, [0]), "bias": bias[None]}
    inputs = SamplingInputs(**{name: jnp.asarray(given[name]) for name in SamplingInputs._fields})
    chosen = _sample(logits[None], inputs, history[None], jnp.array([position], jnp.int32))
    return int(chosen.token[0])


def build(run: Run, directory: Path, example: str, dtype: str, sizes: str) -> Path:
    """Build an example's model, with other sizes."""
    shutil.copy(ROOT / "examples" / example / "model.py", directory)
    manifest = directory / "manifest.toml"
    manifest.write_text(MANIFEST.format(name=example, dtype=dtype, sizes=sizes))
    run("build", manifest, "-o", directory, quick=True)
    return directory / example


@pytest.fixture(scope="module")
def paths(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The bundle of an example, in float32."""

    return functools.cache(
        lambda example: build(
            run, tmp_path_factory.mktemp(example), example, "float32", SIZES[example]
        )
    )


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
    params=[
        "state_space",
        pytest.param("mixture_of_experts", marks=pytest.mark.thorough),
    ],
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


def finish(batch: Batch, texts: dict[int, list[int]]) -> None:
    """Step until all slots are free."""
    while tokens := batch.step():
        take(tokens, texts)


def take(tokens: Sequence[Token], texts: dict[int, list[int]]) -> None:
    for token in tokens:
        if token.token_id is not None:
            texts.setdefault(token.slot, []).append(token.token_id)


def test_prompts_of_every_length_are_cut_into_chunks(subject: Subject) -> None:
    for length in range(1, 3 * LONGEST_CHUNK + 1):
        prompt = TEXTS[0][:length]
        found = subject.bundle.generate(prompt, max_new_tokens=4)
        assert list(found.token_ids) == subject.plain.writes(prompt, 4), length
    assert len(set(subject.plain.writes(TEXTS[0][:9], 4))) > 2, "a text that says something"


@pytest.mark.usefixtures("steps")
def test_rows_come_and_go_beside_each_other(subject: Subject) -> None:
    """The last slot gets a text when others are on their way, and then two more, one after the other."""
    batch, plain = subject.bundle.batch(2), subject.plain
    early = [Request(TEXTS[row][: 11 - 8 * row], max_new_tokens=40) for row in (0, 1)]
    texts: dict[int, list[int]] = {}
    slots = batch.insert(*early[: batch.slots - 1])
    for prompt in (TEXTS[2][:6], TEXTS[3][:1], TEXTS[4][:9]):
        take(batch.step(), texts)
        (last,) = batch.insert(Request(prompt, max_new_tokens=5))
        texts[last] = []
        while len(texts[last]) < 5:
            take(batch.step(), texts)
        assert texts[last] == plain.writes(prompt, 5)
    finish(batch, texts)
    for slot, request in zip(slots, early, strict=False):
        assert texts[slot] == plain.writes(request.prompt, 40)


def test_more_prompts_than_slots(subject: Subject) -> None:
    prompts = [text[: 3 + 4 * place] for place, text in enumerate(TEXTS[:5])]
    found = subject.bundle.generate_batch(prompts, max_new_tokens=7)
    assert [list(each.token_ids) for each in found] == [
        subject.plain.writes(prompt, 7) for prompt in prompts
    ]
    assert {type(each.stats.padding) for each in found} == {float}


@pytest.mark.parametrize("temperature", [0.0, 8.0])
def test_drafts_change_no_token(subject: Subject, temperature: float) -> None:
    """They are verified by a state that cannot go back, beside a row that drafts nothing."""
    batch, plain = subject.bundle.batch(2), subject.plain
    sampling = Sampling(temperature=temperature, seed=3, logit_bias=FEW)
    drafting = Request([7, 90, 301] * 3, sampling, 40, prompt_lookup=True)
    other = Request(TEXTS[1][:9], max_new_tokens=30)
    texts: dict[int, list[int]] = {}
    slots = batch.insert(drafting, other)
    finish(batch, texts)
    assert texts[slots[0]] == plain.writes(drafting.prompt, 40, sampling)
    assert texts[slots[1]] == plain.writes(other.prompt, 30)

    stats = subject.bundle.generate(
        drafting.prompt,
        max_new_tokens=40,
        prompt_lookup=True,
        temperature=temperature,
        seed=3,
        logit_bias=FEW,
    ).stats
    assert 0 < stats.accepted_tokens < stats.drafted_tokens


def test_an_engine_for_many_callers(subject: Subject) -> None:
    """Prompts are computed in chunks beside others, and slots move between batches."""
    engine = Engine(subject.bundle, prefill_tokens=4)
    prompts = [text[: 3 + 4 * place] for place, text in enumerate(TEXTS[:5])]
    futures = [engine.submit(prompt, max_new_tokens=9) for prompt in prompts]
    for prompt, future in zip(prompts, futures, strict=True):
        assert list(future.result(120).token_ids) == subject.plain.writes(prompt, 9)
    engine.close()


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


def test_drafts_before_the_end_of_a_turn(subject: Subject) -> None:
    session, plain = subject.bundle.session(), subject.plain
    options: Any = {"max_new_tokens": 23, "prompt_lookup": True, "logit_bias": FEW}
    sampling, text = Sampling(logit_bias=FEW), TEXTS[5][:6]
    for _ in range(2):
        found = session.generate(text, **options)
        assert list(found.token_ids) == plain.writes(text, 23, sampling)
        text = [*text, *found.token_ids, 8]
    assert found.stats.reused_tokens > 20


def test_a_stream_that_is_left_early(subject: Subject) -> None:
    session, text = subject.bundle.session(), TEXTS[1][:8]
    stream = session.stream(text, max_new_tokens=40)
    begun = [next(stream).token_id for _ in range(3)]
    stream.close()  # type: ignore[attr-defined]
    assert begun == subject.plain.writes(text, 3)
    longer = [*text, *subject.plain.writes(text, 3), 1]
    found = session.generate(longer, max_new_tokens=4)
    assert list(found.token_ids) == subject.plain.writes(longer, 4)


def test_a_prefix_and_several_continuations(subject: Subject) -> None:
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

    for length in (1, 5, 30):
        several = bundle.generate_n(text[:length], 3, max_new_tokens=6, temperature=0.9, seed=11)
        assert [list(each.token_ids) for each in several] == [
            plain.writes(text[:length], 6, Sampling(temperature=0.9, seed=seed))
            for seed in (11, 12, 13)
        ]


def test_a_token_mask(subject: Subject) -> None:
    def mask(generated: Sequence[int]) -> Any:
        return None if len(generated) % 3 == 2 else np.arange(VOCABULARY) % 5 == len(generated) % 5

    text = TEXTS[0][:13]
    found = subject.bundle.generate(text, max_new_tokens=12, token_mask=mask)
    assert list(found.token_ids) == subject.plain.writes(text, 12, mask=mask)


def test_sampling(subject: Subject) -> None:
    text = TEXTS[5][:9]
    for sampling in (
        Sampling(temperature=0.9, seed=7),
        Sampling(temperature=1.3, top_k=9, top_p=0.9, seed=2**40 + 1, presence_penalty=0.5),
        Sampling(repetition_penalty=1.4, frequency_penalty=0.3),
    ):
        expected = subject.plain.writes(text, 16, sampling)
        batch, texts = subject.bundle.batch(2), dict[int, list[int]]()
        slots = batch.insert(Request(text, sampling, 16), Request(TEXTS[1][:4], max_new_tokens=16))
        finish(batch, texts)
        assert texts[slots[0]] == expected
        assert texts[slots[1]] == subject.plain.writes(TEXTS[1][:4], 16)


def test_a_text_fills_its_context(subject: Subject) -> None:
    found = subject.bundle.generate(TEXTS[0][:20])
    assert found.finish_reason == "context"
    assert list(found.token_ids) == subject.plain.writes(TEXTS[0][:20], CONTEXT - 20 + 1)


def test_another_machine_compiles_the_same_text(paths: Callable[[str], Path]) -> None:
    other = dataclasses.replace(Fingerprint.current(), jaxlib="0.4.0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        bundle = load(paths("state_space"), fingerprint=other)
        found = bundle.generate(TEXTS[0][:13], max_new_tokens=9)
    assert list(found.token_ids) == Plain(example_model("state_space")).writes(TEXTS[0][:13], 9)


@pytest.mark.parametrize(
    ("example", "dtype"),
    [
        ("state_space", "int8"),
        pytest.param("state_space", "bfloat16", marks=pytest.mark.thorough),
        pytest.param("mixture_of_experts", "int8", marks=pytest.mark.thorough),
    ],
)
def test_narrow_matrices_write_what_their_values_in_float32_write(
    example: str, dtype: str, run: Run, tmp_path: Path
) -> None:
    path = build(run, tmp_path, example, dtype, "batch = [1]\nprompt = [8]\ncontext = [64]")
    bundle = load(path, on_mismatch="error")
    plain = Plain(dequantized(example_model(example), dtype))
    for length in (1, 13):
        found = bundle.generate(TEXTS[0][:length], max_new_tokens=12)
        assert list(found.token_ids) == plain.writes(TEXTS[0][:length], 12)


def dequantized(model: Any, dtype: str) -> Any:
    """The user's own code with the values that a bundle stores, in float32."""
    found = find_model(Model(module=model, dtype=dtype), "m", None, UserModules(None))
    stored = {name: np.asarray(read()) for name, read in found.stored.values.items()}
    values = {}
    for name in found.exact.values:
        values[name] = jnp.asarray(stored[name], jnp.float32)
        if (scale := stored.get(f"{name}_scale")) is not None:
            values[name] *= scale[..., None, :]  # inputs are the last axis but one
    narrow = [name for name in found.exact.values if str(stored[name].dtype) == dtype]
    assert len(narrow) > 8
    return found.exact.model.bind(values)


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
