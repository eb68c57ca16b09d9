"""A request's tokens are its own: no bucket, chunk, neighbour, growth, draft or reuse changes them."""

import itertools
import json
import os
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.decoders import VOCABULARY
from tests.parity import sibling_cases

from prejit.compiler.native.products import KERNEL, LOOP, WIDENED, Product
from prejit.runtime import Bundle, Sampling, load
from prejit.runtime.device.transfer import to_numpy
from prejit.runtime.generation import decode
from prejit.runtime.generation import sampling_arguments as arguments
from prejit.runtime.generation import slots as engine
from prejit.runtime.generation.decoder_programs import DecoderPrograms
from prejit.runtime.generation.kv_cache import KVCache
from prejit.runtime.generation.options import SAMPLING_OPTIONS, Request
from prejit.runtime.generation.shared_prefix import Prefix

from .test_state_space import state_space_bundle

NEW_TOKENS = 24
LENGTHS = (1, 2, 3, 4, 7, 10, 11, 13, 21, 23, 24, 25, 40, 56, 70, 71, 72)
"""Of prompts: about the edges of prompt buckets (3, 10) and contexts (24, 72), and up to a full one."""
SAMPLINGS = (
    Sampling(),
    Sampling(repetition_penalty=1.3, presence_penalty=-0.3, frequency_penalty=0.4),
    Sampling(temperature=0.8, top_k=12, seed=5),
    Sampling(temperature=1.2, top_p=0.9, min_p=0.02, seed=2**63 + 6, logit_bias={3: -2.0}),
    Sampling(temperature=0.9, seed=7, repetition_penalty=1.2, frequency_penalty=0.7),
)
GREEDY = 0
CLEAR = 1e-4
"""Between the two most likely tokens; what two programs say of one text differs by some 1e-6."""


@dataclass(frozen=True)
class Spec:
    """A request out of a pool, so that its reference is computed once."""

    text: int
    length: int  # so much of the text is the prompt
    sampling: int = GREEDY
    masked: bool = False  # a mask forbids a third of the tokens at each step
    limit: int | None = NEW_TOKENS
    stop: int | None = None  # at the token that would come so late
    logprobs: int | None = None
    lookup: bool = False
    prefix: int = 0  # so much of the text is in a Prefix


def mask(generated, vocab):
    """Which tokens may come after so many: two thirds of them, or all."""
    return None if len(generated) % 4 == 3 else (np.arange(vocab) + len(generated)) % 3 != 0


@dataclass
class Subject:
    """A bundle, and what its model says when nothing is in the way."""

    bundle: Bundle
    texts: list[list[int]]
    known: dict[tuple[int, int, int, bool], tuple[list[int], list[arguments.Logprob]]] = field(
        default_factory=dict
    )
    prefixes: dict[tuple[int, int], Prefix] = field(default_factory=dict)
    is_clear: bool = True  # rounding alone changes no greedy token

    def prompt(self, spec):
        return self.texts[spec.text][: spec.length]

    def tokens(self, spec):
        """The reference of all new tokens, whatever the spec's limit and stop are."""
        key = (spec.text, spec.length, spec.sampling, spec.masked)
        if key not in self.known:
            self.known[key] = self._compute(self.prompt(spec), SAMPLINGS[spec.sampling], key[-1])
            if spec.sampling == GREEDY and not spec.masked:
                gaps = [one.top[0][1] - one.top[1][1] for one in self.known[key][1]]
                assert not self.is_clear or min(gaps) > CLEAR, "choose another seed"
        return self.known[key]

    def _compute(self, prompt, sampling, masked):
        decoder, vocab = self.bundle.decoder, self.bundle.decoder.decoder.vocab_size
        batch = decoder.batches[0]
        context = decoder.contexts[-1]
        cache, program = KVCache(decoder, batch, context), decoder.decode_for(batch, context)
        put = decoder.device.put

        def row(value):
            return put(np.array([value, *[0] * (batch - 1)], np.int32))

        text, logprobs = list(prompt), []
        for place in range(min(len(prompt) + NEW_TOKENS - 1, context)):
            generated = text[len(prompt) :]
            bias = np.zeros((batch, vocab), np.float32)
            bias[0] = arguments.bias_row(sampling, vocab)
            if masked and (allowed := mask(generated, vocab)) is not None:
                bias[0, ~allowed] = -np.inf
            history = np.zeros((batch, vocab), np.int32)
            history[0] = arguments.history_row(prompt, generated, vocab)
            history[0, text[place]] -= 2  # which decode adds
            inputs = arguments.place_sampling(
                decoder, [sampling, *[Sampling()] * (batch - 1)], [1, *[0] * (batch - 1)], bias
            )
            inputs |= {"token": row(text[place]), "position": row(place), "live": row(1)}
            inputs |= {"steps": put(np.array(1, np.int32)), "history": put(history)}
            results = cache.run(program, inputs)
            if place >= len(prompt) - 1:
                token = int(to_numpy(results["tokens"])[0, 0])
                text.append(token)
                names = ("top_tokens", "top_logprobs", "logprobs")
                *top, logprob = (to_numpy(results[name])[0, 0].tolist() for name in names)
                logprobs.append(arguments.Logprob(token, logprob, tuple(zip(*top, strict=True))))
        return text[len(prompt) :], logprobs

    def request(self, spec):
        return Request(self.prompt(spec), SAMPLINGS[spec.sampling], **self.options(spec))

    def options(self, spec):
        vocab = self.bundle.decoder.decoder.vocab_size
        options = {"max_new_tokens": spec.limit, "stop_token_ids": (), "logprobs": spec.logprobs}
        if spec.stop is not None:
            tokens = self.tokens(spec)[0]
            options["stop_token_ids"] = [tokens[spec.stop % len(tokens)]]
        if spec.masked:
            options["token_mask"] = lambda generated: mask(generated, vocab)
        if spec.prefix:
            key = (spec.text, spec.prefix)
            if key not in self.prefixes:
                self.prefixes[key] = self.bundle.prefix(self.texts[spec.text][: spec.prefix])
            options["prefix"] = self.prefixes[key]
        return options | {"prompt_lookup": spec.lookup}

    def expected(self, spec):
        tokens, _ = self.tokens(spec)
        stop = len(tokens)
        if spec.stop is not None:
            stop = tokens.index(tokens[spec.stop % len(tokens)])
        limit = NEW_TOKENS if spec.limit is None else spec.limit
        limit = min(limit, len(tokens))
        if stop < limit:
            return tokens[:stop], "stop"
        return tokens[:limit], "length" if limit == spec.limit else "context"


@pytest.fixture(
    scope="module",
    params=[
        "gpt2",  # with several batches and prompts; each program more is a compilation more
        "mistral-int8",  # with a sliding window, whose cache is int8
        "falcon_h1",  # in which nothing can be taken back of one part, beside keys and values
        *("mistral", "nemotron_h", "qwen3_next", "state_space", "gemma2"),
    ],
)
def subject(request, decoder_dir, make_decoder, run, once, tmp_path_factory):
    name, _, cache_dtype = request.param.partition("-")
    options = {"batch": (2,), "prompt": (10,), "context": (24, 72)}
    if name in ("falcon_h1", "nemotron_h", "qwen3_next"):
        model = tmp_path_factory.mktemp(name)
        next(c for c in sibling_cases.cases() if c.name == f"{name}-0").write(model)
    else:
        model, options["cache_dtype"] = name, cache_dtype or "float32"
    if name == "gpt2":
        made = decoder_dir
    elif name == "state_space":
        made = state_space_bundle(run, once)
    else:
        made = make_decoder(model, **options)
    return with_texts(load(made, on_mismatch="error"))


def with_texts(bundle):
    """Its own, which goes on where a slot left off; one that begins like it; one that repeats itself."""
    random = np.random.default_rng(1)
    vocabulary = min(48, bundle.decoder.decoder.vocab_size)
    own, other = random.integers(0, vocabulary, (2, 72)).tolist()
    pattern = random.integers(0, vocabulary, 5).tolist()
    subject = Subject(bundle, [own[:10], other, (pattern * 15)[:72]])
    while len(own := subject.texts[0]) < 72:
        own += subject.tokens(Spec(0, len(own)))[0]
    subject.texts[:2] = own[:72], [*own[:21], *other[21:]]
    return subject


specs = st.builds(  # texts that go on where another ended must meet often
    Spec,
    text=st.sampled_from([0, 0, 0, 1, 2]),
    length=st.sampled_from(LENGTHS),
    sampling=st.sampled_from([GREEDY, GREEDY, GREEDY, *range(1, len(SAMPLINGS))]),
    masked=st.integers(0, 7).map(lambda draw: draw == 0),
    limit=st.integers(1, NEW_TOKENS),
    stop=st.none() | st.integers(0, NEW_TOKENS),
    logprobs=st.sampled_from([None, None, 0, 3]),
    lookup=st.booleans(),
    prefix=st.sampled_from([0, 0, 1, 8, 21, 24, 60]),
)
to_the_end = st.builds(
    Spec,
    text=st.integers(0, 2),
    length=st.sampled_from([length for length in LENGTHS if length > 72 - NEW_TOKENS]),
    limit=st.none(),
    lookup=st.booleans(),
)
requests = specs | to_the_end
turns = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 4)), min_size=2, max_size=4)
events = st.one_of(
    st.tuples(st.just("insert"), st.lists(requests, min_size=1, max_size=4)),
    st.tuples(st.just("step"), st.integers(1, 6)),
    st.tuples(st.just("evict"), st.integers(0, 3)),
    st.tuples(st.just("close"), st.none()),
    st.tuples(st.just("in_session"), st.lists(requests, min_size=2, max_size=4)),
    st.tuples(st.just("converse"), st.tuples(st.sampled_from(LENGTHS[:9]), turns)),
    st.tuples(st.just("generate_batch"), st.lists(requests, min_size=1, max_size=6)),
    st.tuples(st.just("generate_n"), st.tuples(requests, st.integers(1, 6))),
)
scripts = st.lists(events, min_size=1, max_size=14)
steps = st.lists(st.integers(1, 16), min_size=1, max_size=4)
lastings = st.sampled_from([0, 1, 6, 32])


class Script:
    """Runs events, each by the method of its name."""

    def __init__(self, subject):
        self.subject, self.session = subject, subject.bundle.session()
        self.batch = subject.bundle.batch(subject.bundle.decoder.batches[-1])
        self.live = {}

    def insert(self, wanted):
        wanted = wanted[: self.batch.free]
        slots = self.batch.insert(*map(self.subject.request, wanted))
        assert len(set(slots)) == len(wanted)
        for slot, spec in zip(slots, wanted, strict=True):
            assert slot not in self.live, "a slot that is taken was given out"
            self.live[slot] = (spec, [])

    def step(self, count):
        for _ in range(count):
            tokens = self.batch.step()
            assert bool(tokens) == bool(self.live)
            for token in tokens:
                self._check(token)
            assert self.batch.free == self.batch.slots - len(self.live)

    def _check(self, token):
        spec, given = self.live[token.slot]
        expected, reason = self.subject.expected(spec)
        if token.token_id is not None:
            given.append(token.token_id)
        assert given == expected[: len(given)], spec
        if token.token_id is None or spec.logprobs is None:
            assert token.logprob is None
        else:
            right, found = self.subject.tokens(spec)[1][len(given) - 1], token.logprob
            assert (found.token_id, len(found.top)) == (right.token_id, spec.logprobs)
            values = [[one.logprob, *(value for _, value in one.top)] for one in (found, right)]
            assert values[0] == pytest.approx(values[1][: spec.logprobs + 1], abs=1e-4)
        if token.finish_reason is not None:
            assert (given, token.finish_reason) == (expected, reason), spec
            del self.live[token.slot]

    def evict(self, number):
        if self.live:
            slot = sorted(self.live)[number % len(self.live)]
            self.batch.evict(slot)
            del self.live[slot]

    def close(self, _):
        self.batch.close()
        self.live.clear()

    def _generate(self, spec, generate):
        sampling = SAMPLINGS[spec.sampling]
        given = {name: getattr(sampling, name) for name in SAMPLING_OPTIONS}
        result = generate(self.subject.prompt(spec), **given, **self.subject.options(spec))
        for one in result if isinstance(result, list) else [result]:
            assert (list(one.token_ids), one.finish_reason) == self.subject.expected(spec), spec
            assert 0 <= one.stats.padding < 1
            assert one.stats.accepted_tokens <= one.stats.drafted_tokens

    def in_session(self, wanted):
        for spec in wanted:
            self._generate(spec, self.session.generate)

    def converse(self, turns):
        """Each prompt is all that was said, and more."""
        length, turns = turns
        for limit, more in turns:
            self.in_session([Spec(0, length, limit=limit)])
            length = min(length + limit + more, 72)

    def generate_batch(self, wanted):
        """More requests than slots, that share all but prompts and sampling with the first."""
        wanted = [Spec(s.text, s.length, s.sampling, lookup=wanted[0].lookup) for s in wanted]
        results = self.subject.bundle.generate_batch(
            [self.subject.prompt(spec) for spec in wanted],
            sampling=[SAMPLINGS[spec.sampling] for spec in wanted],
            **self.subject.options(wanted[0]),
        )
        for spec, result in zip(wanted, results, strict=True):
            found = (list(result.token_ids), result.finish_reason)
            assert found == self.subject.expected(spec), spec

    def generate_n(self, wanted):
        """Greedy ones are all the same; of others the first is."""
        spec, n = wanted

        def generate(prompt, **options):
            results = self.subject.bundle.generate_n(prompt, n, **options)
            assert len(results) == n
            return results if SAMPLINGS[spec.sampling].temperature == 0 else results[0]

        self._generate(spec, generate)


# `make hostile` tries other examples each time, and ten times as many.
HOSTILE = "PREJIT_HOSTILE_EXAMPLES" in os.environ
SLOW = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]


@pytest.mark.thorough
@settings(max_examples=150 if HOSTILE else 15, derandomize=not HOSTILE, suppress_health_check=SLOW)
@given(script=scripts, calls=steps, lasting=lastings)
def test_tokens_depend_on_nothing_but_the_request(subject, script, calls, lasting):
    run, given = Script(subject), itertools.cycle(calls)
    with pytest.MonkeyPatch.context() as patch:
        # Calls take so many steps where there is room; else that depends on measured times.
        patch.setattr(decode, "CALL_SECONDS", 1e9)
        patch.setattr(DecoderPrograms, "max_steps", lambda *_: next(given))
        # A cache has room for them, then it grows.
        patch.setattr(engine, "_LASTING_TOKENS", lasting)
        for name, value in script:
            getattr(run, name)(value)
        while run.live:
            run.step(1)
        assert run.batch.step() == []


# --- Weights of fewer bits -----------------------------------------------------------------------------

PROMPTS = (8, 24, 32, 128)
"""Buckets with as many rows as those from which kernels sum in another order."""
BATCH, DRAFT = 8, 8
MIXED = {1: KERNEL, 8: LOOP, 9: KERNEL, 24: LOOP, 32: WIDENED, 72: WIDENED, 128: KERNEL}
"""Forms by the number of rows: measured tables are as mixed, though not on every machine."""
MOST_MOVED = 1e-2
"""Of a log-probability by another order of sums. An x next to the middle of two bfloat16 numbers becomes the
other one: rare, and 5e-3 at most here. Were x rounded for some numbers of rows, it were 14e-3 as the rule."""
FEW = 1 / 4
"""Of the requests that move by more than float32 does."""


def table_of(forms, dtype, path):
    """A table for --forms by which products of so many rows have these forms, others the kernel."""
    sizes = (12, 24, 32, VOCABULARY)
    rows = {many * one for many in (1, BATCH) for one in (1, DRAFT + 1, *PROMPTS)}
    nanoseconds = {}
    for each in itertools.product(rows, sizes, sizes):
        product = Product(dtype, *each, in_out=False)
        fastest = forms.get(product.rows, KERNEL)
        nanoseconds[str(product)] = {form: 1 if form == fastest else 9 for form in product.forms}
    section = {"cpu": "any", "cpus": 1, "jaxlib": "0.10.2", "compiler": "any", "date": "2026-11-21"}
    section["kernels"] = f"sha256:{'0' * 64}"
    levels = ("x86-64-v2", "x86-64-v3", "x86-64-v4")
    measured = [{**section, "level": level, "nanoseconds": nanoseconds} for level in levels]
    path.write_text(json.dumps({"version": 1, "measured": measured}))
    return path


@pytest.fixture(
    scope="module",
    params=[
        ("int8", MIXED, True, "int8"),
        ("float32", {}, True, "int8"),
        ("int8", MIXED, True, "float32"),
        ("bfloat16", MIXED, False, "float32"),
        ("bfloat16", {}, False, "float32"),
    ],
    ids=["int8-mixed", "int8-cache", "int8-weights", "bfloat16-mixed", "bfloat16-kernels"],
)
def low(request, make_decoder, tmp_path_factory):
    dtype, forms, quick, cache_dtype = request.param
    table = table_of(forms, dtype, tmp_path_factory.mktemp("forms") / "forms.json")
    buckets = {"batch": (1, BATCH), "prompt": PROMPTS, "context": (144,), "draft_tokens": DRAFT}
    # Compiled quickly, programs round bfloat16 in other places than users' programs do.
    settings = {"dtype": dtype, "forms": table, "quick": quick, "cache_dtype": cache_dtype}
    path = make_decoder("llama", **buckets, **settings)
    random = np.random.default_rng(3)
    texts = [random.integers(0, VOCABULARY, 144).tolist() for _ in range(BATCH - 1)]
    pattern = random.integers(0, VOCABULARY, 5).tolist()
    texts.append((pattern * 29)[:144])
    return Subject(load(path, on_mismatch="error"), texts, is_clear=False)


def logprobs_of(batch, slots):
    """What the request in each slot gets until all of them end."""
    found, left = {slot: [] for slot in slots}, set(slots)
    while left:
        for token in batch.step():
            if token.token_id is not None:
                found[token.slot].append(token.logprob)
            if token.finish_reason is not None:
                left.remove(token.slot)
    return [found[slot] for slot in slots]


def most_moved(expected, found):
    """Of the log-probabilities of tokens, up to the first one where rounding may choose another."""
    moved = 0.0
    for one, other in zip(expected, found, strict=False):
        if other.token_id != one.token_id:
            assert one.top[0][1] - one.top[1][1] < 2 * MOST_MOVED
            break
        pairs = zip(one.top, other.top, strict=False)
        moved = max(moved, *(abs(a - b) for (_, a), (_, b) in pairs))
    return moved


@pytest.mark.thorough
def test_a_token_of_low_precision_depends_on_how_many_rows_a_product_has(low):
    """Prefill of 8 to 1024 rows, decode of 1 and 8, drafts that are verified in 9 and 72."""
    moved = {}
    for length, lookup, slots in itertools.product(PROMPTS, (False, True), (1, BATCH)):
        batch = low.bundle.batch(slots)
        texts = range(BATCH - slots, BATCH)  # the last repeats itself: drafts are right
        specs = [Spec(text, length, limit=12, logprobs=3, lookup=lookup) for text in texts]
        results = logprobs_of(batch, batch.insert(*map(low.request, specs)))
        for spec, found in zip(specs, results, strict=True):
            at = (length, lookup, slots, spec.text)
            moved[at] = most_moved(low.tokens(spec)[1][:12], found)
    assert max(moved.values()) < MOST_MOVED, moved
    assert sum(value > CLEAR / 10 for value in moved.values()) < FEW * len(moved), moved


@pytest.mark.thorough
def test_a_token_of_low_precision_depends_on_its_neighbours(low):
    """What a row gets is the same to the last bit in one program, whatever the other rows are."""
    requests = [low.request(Spec(text, 24, limit=8, logprobs=3)) for text in range(BATCH)]
    batch = low.bundle.batch(BATCH)
    slots = [slot for request in requests for slot in batch.insert(request)]  # each prefilled alone
    for request, expected in zip(requests, logprobs_of(batch, slots), strict=True):
        batch = low.bundle.batch(BATCH)
        assert logprobs_of(batch, batch.insert(request)) == [expected]
