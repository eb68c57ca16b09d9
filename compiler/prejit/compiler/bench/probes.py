"""Measurements of a bundle in one process, in rounds: a drift of the machine falls on all rows alike."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from prejit.compiler.bench.bench_report import MIN_QUARTILE_SAMPLES, YARDSTICK, Head, Ratio
from prejit.runtime.bundle import Bundle
from prejit.runtime.device.transfer import DeviceArray, to_numpy
from prejit.runtime.encoding.encoder import EncoderPrograms
from prejit.runtime.format.bundle_schema import ProgramEntry
from prejit.runtime.generation.continuous_batch import Batch
from prejit.runtime.generation.decode import steps_per_call
from prejit.runtime.generation.decoder_programs import DecoderPrograms
from prejit.runtime.generation.generate import Generation, run
from prejit.runtime.generation.kv_cache import KVCache
from prejit.runtime.generation.options import Request, Sampling
from prejit.runtime.generation.sampling_arguments import place_sampling

Say = Callable[[str], None]
"""A function that shows one line of progress."""

SEED = 20_260_101
"""The seed of prompts and of the order of measurements: two runs do the same work."""
_ROUNDS = 20
"""The time is divided into this many rounds; quick probes get more."""
_MIN_TURNS = 3
"""Every probe runs this often, up to twice the given time, because a spread needs it; once in any case."""
_MAX_REPEATS = 50


@dataclass(frozen=True, slots=True)
class Probe:
    """Something to measure repeatedly.

    Attributes:
        heads: the rows that it gives samples of.
        run: runs it once and returns the samples of each row, in the order of `heads`.
        weight: its relative share of the time.
    """

    heads: tuple[Head, ...]
    run: Callable[[], Sequence[Sequence[float]]]
    weight: float = 1


Rounds = dict[Head, list[list[float]]]
"""The samples of each row, round by round. A round may have none."""


def ratio_in_turns(after: Sequence[Sequence[float]], before: Sequence[Sequence[float]]) -> Ratio:
    """Return the ratio of two sides that alternated: the median of the ratios of each round.

    Rounds in which a side has no samples do not count.
    """
    pairs = [(new, old) for new, old in zip(after, before, strict=True) if new and old]
    ratios = [float(np.median(new) / np.median(old)) for new, old in pairs]
    outer = 0.25 if len(ratios) >= MIN_QUARTILE_SAMPLES else 0.0
    return Ratio(
        least=min(min(new) for new, _ in pairs) / min(min(old) for _, old in pairs),
        middle=float(np.median(ratios)),
        low=float(np.quantile(ratios, outer)),
        high=float(np.quantile(ratios, 1 - outer)),
    )


@dataclass(slots=True)
class _Turns:
    """The probes of one row, one for each side, and the time that they may use.

    Attributes:
        probes: each with the number of its side.
        credit: seconds that they may still use.
        spent: seconds that they have used.
        calls: how often they have run.
        rounds: the number of rounds in which they ran.
    """

    probes: list[tuple[int, Probe]]
    credit: float = 0.0
    spent: float = 0.0
    calls: int = 0
    rounds: int = 0

    def repeats(self, share: float, least_rounds: int) -> int:
        """Return how often to run in the next round, given another share of the time in seconds."""
        self.credit += share
        affordable = int(self.credit * self.calls / self.spent) if self.calls else 1
        return min(_MAX_REPEATS, max(affordable, self.rounds < least_rounds))

    def take(self, repeats: int, found: Sequence[Rounds], share: float) -> None:
        """Run the probes and add their samples to the last round of each side."""
        started = time.perf_counter()
        self.rounds += 1
        probes = self.probes if self.rounds % 2 else self.probes[::-1]
        for _ in range(repeats):
            for side, probe in probes:
                for head, samples in zip(probe.heads, probe.run(), strict=True):
                    found[side][head][-1].extend(samples)
        took = time.perf_counter() - started
        self.spent += took
        self.calls += repeats
        # A probe that does not use up its share cannot save the rest for later.
        self.credit = min(self.credit - took, share)


def run_in_rounds(sides: Sequence[Sequence[Probe]], seconds: float, say: Say) -> list[Rounds]:
    """Run the probes of all sides in alternation for `seconds`. Return the samples of each side."""
    things: dict[str, _Turns] = {}
    for side, probes in enumerate(sides):
        for probe in probes:
            things.setdefault(probe.heads[0].name, _Turns([])).probes.append((side, probe))
    for number, (name, thing) in enumerate(things.items(), 1):
        say(f"first calls: {number} of {len(things)}: {name}")
        for _, probe in thing.probes:
            probe.run()  # the first call loads programs, so it is not measured
    found: list[Rounds] = [{h: [] for p in probes for h in p.heads} for probes in sides]
    turns = list(things.values())
    share = seconds / _ROUNDS / sum(thing.probes[0][1].weight for thing in turns)
    order = seeded_random(SEED)
    started = time.perf_counter()

    def passed() -> float:
        return time.perf_counter() - started

    def least_rounds() -> int:
        return _MIN_TURNS if passed() < 2 * seconds else 1

    while passed() < seconds or any(thing.rounds < least_rounds() for thing in turns):
        for rounds in found:
            for row in rounds.values():
                row.append([])
        order.shuffle(turns)
        for thing in turns:
            say(f"measuring: {passed():.0f} of {seconds:.0f} s, {len(turns)} things in turns")
            own = share * thing.probes[0][1].weight
            if (repeats := thing.repeats(own, least_rounds())) > 0:
                thing.take(repeats, found, own)
    return found


def seeded_random(seed: int) -> random.Random:
    """Return a generator that gives the same numbers in every run."""
    return random.Random(seed)  # noqa: S311 (for equal work in every run, not for secrets)


_REQUEST_WEIGHT = 4
"""The share of time that a request gets, when a single program gets 1. Its percentiles need more samples."""
PROMPTS = (16, 64, 256, 1024)
"""Lengths of prompts, up to the context. They are fixed, so that bundles with other buckets compare."""
NEW_TOKENS = 32
_REQUESTS, _REQUEST_TOKENS = 16, 128
"""The number of requests that arrive together, and the maximum tokens of a prompt."""
_SENTENCES, _SENTENCE_TOKENS = 32, 128
"""The number of sentences that arrive together, and the maximum tokens of a sentence."""
_YARDSTICK_BYTES = 64 << 20


def _timed(function: Callable[[], object]) -> Callable[[], Sequence[Sequence[float]]]:
    def run_once() -> Sequence[Sequence[float]]:
        started = time.perf_counter()
        function()
        return [[time.perf_counter() - started]]

    return run_once


def probes_of(bundle: Bundle) -> Iterable[Probe]:
    """Return the probes of everything that a bundle can do."""
    yield _yardstick()
    if bundle.config.decoder is not None:
        decoder = bundle.decoder
        yield from _latency(decoder)
        yield _serving(decoder)
        yield from _programs(decoder)
    if bundle.config.encoder is not None:
        bundle.prepare()  # otherwise a background thread loads programs while others are measured
        yield from _encoding(bundle.encoder)
    for program in bundle.config.programs:
        if program.kind in ("call", "image"):
            yield _runner(bundle, program)


def _yardstick() -> Probe:
    """Return the probe of the machine: NumPy's sum of an array larger than the caches, in one thread."""
    array = np.ones(_YARDSTICK_BYTES // 4, np.float32)
    head = Head("machine", YARDSTICK, "NumPy's sum of float32, one thread")
    return Probe((head,), _timed(array.sum))


def _runner(bundle: Bundle, program: ProgramEntry) -> Probe:
    sizes = ", ".join(f"{name} {size}" for name, size in program.bucket.items())
    # The prefix keeps a program that is called `load` or `peak RSS` apart from the rows of these names.
    head = Head("call", f"call {program.name}", f"a call on zeros{f' ({sizes})' if sizes else ''}")
    return Probe((head,), _timed(bundle.runner_with_zeros(program)))


def _encoding(encoder: EncoderPrograms) -> Iterable[Probe]:
    """Return probes of sentences that fill each shape, and of mixed lengths; as token ids, untokenized."""
    for bucket in encoder.buckets:
        parts = max(1, bucket.length // 64) if bucket.sentences else bucket.batch
        lengths = [bucket.batch * bucket.length // parts] * parts
        yield _sentences(encoder, f"encode {bucket}", lengths, with_padding=False)
    order = seeded_random(SEED)
    longest = min(_SENTENCE_TOKENS, encoder.max_tokens)
    lengths = [_log_uniform(order, min(4, longest), longest) for _ in range(_SENTENCES)]
    name = f"encode {_SENTENCES} of mixed lengths"
    yield _sentences(encoder, name, lengths, with_padding=True)


def _sentences(
    encoder: EncoderPrograms, name: str, lengths: Sequence[int], *, with_padding: bool
) -> Probe:
    vocab = encoder.encoder.vocab_size
    sentences = [random_prompt(length, vocab, seed) for seed, length in enumerate(lengths)]
    work = f"{len(lengths)} sentences, {sum(lengths)} tokens, in the cheapest shapes"
    heads = (
        Head("encode", name, work, items=len(lengths), item="sentences"),
        Head("encode", f"{name}, padding", f"{work}; tokens computed for each needed", "x"),
    )
    wanted = heads if with_padding else heads[:1]

    def run_once() -> Sequence[Sequence[float]]:
        started = time.perf_counter()
        found = encoder.encode(sentences)
        samples = [time.perf_counter() - started], [1 / (1 - found.stats.padding)]
        return samples[: len(wanted)]

    return Probe(wanted, run_once)


def _log_uniform(order: random.Random, least: int, most: int) -> int:
    """Return a random length; short ones are as common as in text that people write."""
    return round(math.exp(order.uniform(math.log(least), math.log(most))))


def random_prompt(length: int, vocab_size: int, seed: int) -> list[int]:
    """Return random token ids. Prompts of different seeds share no prefix, so no cache helps."""
    order = seeded_random(SEED * 1_000 + seed)
    return [order.randrange(vocab_size) for _ in range(length)]


def _latency(decoder: DecoderPrograms) -> Iterable[Probe]:
    """Return probes of the first token for each prompt length, and of further tokens for each batch."""
    longest = decoder.contexts[-1]
    lengths = [length for length in PROMPTS if length < longest] or [longest]
    for length in lengths:
        yield _request(decoder, 1, length, 1)
    shortest = max(1, min(lengths[0], longest - NEW_TOKENS))
    new_tokens = min(NEW_TOKENS, longest - shortest + 1)
    for rows in sorted({1, *decoder.batches}) if new_tokens > 1 else ():
        yield _request(decoder, rows, shortest, new_tokens)


def _request(decoder: DecoderPrograms, rows: int, length: int, new_tokens: int) -> Probe:
    """Return the probe of requests that begin together, each in its own slot, with each step timed."""
    vocab = decoder.decoder.vocab_size
    requests = [
        Request(random_prompt(length, vocab, row), max_new_tokens=new_tokens, stop_token_ids=())
        for row in range(rows)
    ]
    together = f"{rows} together" if rows > 1 else "alone"
    work = f"prompts of {length} tokens"
    first = Head("latency", f"first token, prompt {length}, {together}", work)
    further = Head(
        "latency",
        f"further token, {together}",
        f"{work}, {new_tokens} new, greedy; a call's time shared by its tokens",
        items=rows,
        item="tokens",
    )

    def run_once() -> Sequence[Sequence[float]]:
        started = time.perf_counter()
        batch = Batch(decoder, rows)
        batch.insert(*requests)
        batch.step()
        firsts = [time.perf_counter() - started]
        furthers: list[float] = []
        if new_tokens == 1:
            return [firsts]
        while True:
            started = time.perf_counter()
            tokens = len(batch.step()) // rows
            if not tokens:
                return [furthers]
            furthers += [(time.perf_counter() - started) / tokens] * tokens

    return Probe((first if new_tokens == 1 else further,), run_once, _REQUEST_WEIGHT)


def _serving(decoder: DecoderPrograms) -> Probe:
    """Return the probe of requests of different lengths that arrive at once and fill all slots."""
    longest = decoder.contexts[-1]
    order = seeded_random(SEED)
    top = max(1, min(_REQUEST_TOKENS, longest // 2))
    most = min(NEW_TOKENS, longest - top)
    sizes = [(_log_uniform(order, 1, top), order.randint(1, most)) for _ in range(_REQUESTS)]
    vocab = decoder.decoder.vocab_size
    requests = [
        Request(random_prompt(prompt, vocab, seed), max_new_tokens=new, stop_token_ids=())
        for seed, (prompt, new) in enumerate(sizes)
    ]
    prompts, new_tokens = (sum(each) for each in zip(*sizes, strict=True))
    name = f"{_REQUESTS} requests"
    work = f"{prompts} tokens of prompts, {new_tokens} new"
    heads = (
        Head("serving", f"{name}, all of them", work, items=new_tokens, item="tokens"),
        Head("serving", f"{name}, one's first token", work),
        Head("serving", f"{name}, one's last token", work),
        Head("serving", f"{name}, padding", f"{work}; positions computed for each needed", "x"),
    )

    def run_once() -> Sequence[Sequence[float]]:
        firsts: list[float] = []
        lasts: list[float] = []
        computed, needed = 0.0, 0
        started = time.perf_counter()
        for _, piece in run(decoder, [Generation(decoder, r, None) for r in requests]):
            if (stats := piece.stats) is not None:
                firsts.append(stats.first_token_seconds)
                lasts.append(time.perf_counter() - started)
                useful = stats.prompt_tokens - stats.reused_tokens + max(0, stats.new_tokens - 1)
                needed += useful
                computed += useful / (1 - stats.padding)
        return [[time.perf_counter() - started], firsts, lasts, [computed / needed]]

    return Probe(heads, run_once, _REQUEST_WEIGHT)


def _programs(decoder: DecoderPrograms) -> Iterable[Probe]:
    """Return a probe of each program. Programs of a bucket share a cache; prefill fills all rows."""
    caches = {
        (batch, context): KVCache(decoder, batch, context)
        for batch in decoder.batches
        for context in decoder.contexts
    }
    for bucket, cache in caches.items():
        for program in decoder.prefills(*bucket):
            yield _prefill(decoder, program, cache)
    for bucket, cache in caches.items():
        yield _decode(decoder, decoder.decode_for(*bucket), cache)
    for bucket, cache in caches.items():
        if (verify := decoder.verify_for(*bucket)) is not None:
            yield _verify(decoder, verify, cache)
    for (batch, context), cache in caches.items():
        if (longer := decoder.context_for(context + 1)) > context:
            yield _growth(decoder, batch, longer, cache)


def _fixed(decoder: DecoderPrograms, batch: int) -> dict[str, DeviceArray]:
    """Return sampling arguments and a new history, which programs may donate."""
    history = decoder.device.put(np.zeros((batch, decoder.decoder.vocab_size), np.int32))
    return {**place_sampling(decoder, [Sampling()] * batch, [0] * batch), "history": history}


def _tokens(decoder: DecoderPrograms, *shape: int) -> DeviceArray:
    values = np.random.default_rng(SEED).integers(0, decoder.decoder.vocab_size, shape, np.int32)
    return decoder.device.put(values)


def _prefill(decoder: DecoderPrograms, program: ProgramEntry, cache: KVCache) -> Probe:
    batch, length = cache.batch, program.bucket["prompt"]
    put = decoder.device.put
    inputs = {
        **_fixed(decoder, batch),
        "tokens": _tokens(decoder, batch, length),
        "start": put(np.zeros(batch, np.int32)),
        "length": put(np.full(batch, length, np.int32)),
    }
    head = Head(
        "prefill", program.name, "an empty cache", items=batch * length, item="prompt tokens"
    )
    return Probe((head,), _timed(lambda: to_numpy(cache.run(program, inputs)["token"])))


def _decode(decoder: DecoderPrograms, program: ProgramEntry, cache: KVCache) -> Probe:
    batch, context, put = cache.batch, cache.context, decoder.device.put
    inputs = {
        **_fixed(decoder, batch),
        "token": _tokens(decoder, batch),
        "position": put(np.full(batch, context // 2, np.int32)),
        "live": put(np.ones(batch, np.int32)),
    }
    most, steps = min(decoder.max_steps(program), context // 2), 1

    def run_once() -> Sequence[Sequence[float]]:
        nonlocal steps
        given = {**inputs, "steps": put(np.array(steps, np.int32))}
        started = time.perf_counter()
        results = cache.run(program, given)
        to_numpy(results["tokens"])
        seconds = (time.perf_counter() - started) / steps
        inputs["history"] = results["history"]
        steps = steps_per_call(seconds, most)
        return [[seconds]]

    work = f"at position {context // 2}; several steps a call where they are quick"
    return Probe((Head("decode", program.name, work, items=batch, item="tokens"),), run_once)


def _verify(decoder: DecoderPrograms, program: ProgramEntry, cache: KVCache) -> Probe:
    batch, context, put = cache.batch, cache.context, decoder.device.put
    width = program.bucket["draft"] + 1
    inputs = {
        **_fixed(decoder, batch),
        "tokens": _tokens(decoder, batch, width),
        "start": put(np.full(batch, min(context // 2, context - width), np.int32)),
        "length": put(np.full(batch, width, np.int32)),
    }

    def pass_once() -> None:
        results = cache.run(program, inputs)
        to_numpy(results["tokens"])
        inputs["history"] = results["history"]

    head = Head("verify", program.name, f"{width - 1} drafts in each row")
    return Probe((head,), _timed(pass_once))


def _growth(decoder: DecoderPrograms, batch: int, longer: int, cache: KVCache) -> Probe:
    def grow() -> None:
        arrays = cache.grown(longer).arrays
        # A GPU works in order and reading from it costs more than growing, so the last array is enough.
        for array in arrays if decoder.device.platform == "cpu" else arrays[-1:]:
            to_numpy(array)

    head = Head("growth", f"b{batch}: c{cache.context} to c{longer}", "all arrays of a cache")
    return Probe((head,), _timed(grow))
