"""Measures bundles: fresh processes for start-up and memory, then everything else in turns in this one.

What is measured in one process goes in rounds: every probe gets its share of the time in each of them, in
an order of the round's own, so that a drift of the machine falls on all rows alike. A probe that takes
longer than its share pauses for some rounds. Two bundles take turns within a probe.
"""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

import numpy as np

from prejit.runtime.bench.report import (
    GROUPS,
    MIN_QUARTILE_SAMPLES,
    REPORT_VERSION,
    YARDSTICK,
    Comparison,
    Ratio,
    Report,
    Row,
    better_of,
    compare,
    quantile,
    summarize,
)
from prejit.runtime.bundle import Bundle
from prejit.runtime.device.executable import DeviceArray, to_numpy
from prejit.runtime.encoding.encoder import EncoderPrograms
from prejit.runtime.errors import ProcessError
from prejit.runtime.format.schema import Program
from prejit.runtime.generation.batch import Batch
from prejit.runtime.generation.decode import steps_per_call
from prejit.runtime.generation.decoder_programs import DecoderPrograms
from prejit.runtime.generation.generate import Generation, run
from prejit.runtime.generation.kv_cache import KVCache
from prejit.runtime.generation.options import Request, Sampling
from prejit.runtime.generation.sampling import place_sampling
from prejit.runtime.loader import load
from prejit.runtime.machine.fingerprint import Fingerprint

Say = Callable[[str], None]
"""Takes a line of progress."""

SEED = 20_260_101
"""Of prompts and of the order in which things are measured: two runs do the same work."""
_ROUNDS = 20
"""Into which the time is divided; more where probes are quick."""
_MIN_TURNS = 3
"""Of every probe, even if that takes twice the time: a spread needs as many. One it gets at any price."""
_MAX_REPEATS = 50
_REQUEST_WEIGHT = 4
"""Of what users see, beside 1 of a single program: those need more samples for their percentiles."""
_PROMPTS = (16, 64, 256, 1024)
"""Lengths, as far as the context goes. Not those of the buckets: bundles of other buckets must compare."""
_NEW_TOKENS = 32
_REQUESTS, _REQUEST_TOKENS = 16, 128
"""How many arrive together, and the most tokens of a prompt."""
_SENTENCES, _SENTENCE_TOKENS = 32, 128
"""How many come together, and the most tokens of one."""
_YARDSTICK_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Setup:
    """How a bundle is loaded, in this process and in fresh ones.

    Attributes:
        path: of the bundle.
        require_aot: fail rather than compile here.
        fingerprint: of the machine that this one is taken for, as a file.
    """

    path: str
    require_aot: bool = False
    fingerprint: str | None = None

    def load(self) -> Bundle:
        """Loads it. Raises as `load`."""
        return load(
            self.path,
            on_mismatch="error" if self.require_aot else "jit",
            fingerprint=Fingerprint.read(self.fingerprint) if self.fingerprint else None,
        )


@dataclass(frozen=True, slots=True)
class Head:
    """What a row is called, and what one of its samples is: see Row."""

    group: str
    name: str
    work: str
    unit: str = "s"
    items: float | None = None
    item: str | None = None


@dataclass(frozen=True, slots=True)
class Probe:
    """Something that is done again and again, and gives samples of some rows each time.

    Attributes:
        heads: the rows.
        run: does it once; gives the samples of each row, in the order of `heads`.
        weight: of its share of the time.
    """

    heads: tuple[Head, ...]
    run: Callable[[], Sequence[Sequence[float]]]
    weight: float = 1


Rounds = dict[Head, list[list[float]]]
"""Of each row the samples of each round, which may be none."""


def judge(
    setups: Sequence[Setup],
    bundles: Sequence[Bundle],
    baseline: Report | None,
    *,
    runs: int,
    seconds: float,
    tolerance: float,
    say: Say,
    other: str = "",
) -> tuple[Report, Comparison | None]:
    """Measures a bundle and compares it: with a second one in turns, or with a baseline.

    Rows that look worse are measured once more, and the better of both times counts: a regression is
    there again, a neighbour on the machine mostly is not.

    Args:
        setups: how fresh processes load the bundles.
        bundles: the same, loaded here; the first is judged by the second, where there is one.
        baseline: where there is no second.
        runs: as `measure`.
        seconds: as `measure`.
        tolerance: as Comparison.
        say: is told what goes on.
        other: what to call the other side.

    Raises:
        UsageError: a fresh process failed.
    """
    reports, in_turns = measure(setups, bundles, runs=runs, seconds=seconds, say=say)

    def compared() -> Comparison | None:
        before = baseline if len(bundles) == 1 else reports[1]
        if before is None:
            return None
        turns = in_turns if len(bundles) > 1 else None
        return compare(before, reports[0], other=other, tolerance=tolerance, in_turns=turns)

    comparison = compared()
    if comparison is not None and (worse := {delta.name for delta in comparison.regressions}):
        say(f"{len(worse)} rows look worse and are measured again")
        again, turns_again = measure(
            setups, bundles, runs=runs, seconds=seconds / 2, say=say, only={*worse, YARDSTICK}
        )
        reports = [better_of(*pair) for pair in zip(reports, again, strict=True)]
        for name, ratio in turns_again.items():
            in_turns[name] = min(in_turns[name], ratio, key=lambda one: one.middle)
        comparison = compared()
    return reports[0], comparison


def measure(
    setups: Sequence[Setup],
    bundles: Sequence[Bundle],
    *,
    runs: int,
    seconds: float,
    say: Say,
    only: Collection[str] | None = None,
) -> tuple[list[Report], dict[str, Ratio]]:
    """Measures one bundle, or two in turns.

    Args:
        setups: how fresh processes load them.
        bundles: the same, loaded here.
        runs: fresh processes of each bundle, after one that warms caches.
        seconds: of each bundle, for all that is measured in this process.
        say: is told what goes on.
        only: names of rows to measure, with those that come with them; None: all.

    Returns:
        The reports; and of two bundles the ratios of the first to the second within each turn, by row.

    Raises:
        UsageError: a fresh process failed.
    """

    def wanted(heads: Iterable[Head]) -> bool:
        return only is None or any(head.name in only for head in heads)

    fresh: list[Rounds] = [{} for _ in bundles]
    if wanted(_fresh_heads("").values()):
        fresh = _fresh_processes(setups, bundles, runs, say)
    say("preparing")
    probes = [[probe for probe in _probes(bundle) if wanted(probe.heads)] for bundle in bundles]
    warm = _in_rounds(probes, seconds * len(bundles), say)
    sides = [{**one, **other} for one, other in zip(fresh, warm, strict=True)]
    reports = []
    for bundle, side in zip(bundles, sides, strict=True):
        rows = [_row(head, rounds) for head, rounds in side.items()]
        rows.sort(key=lambda row: list(GROUPS).index(row.group))
        reports.append(_report(bundle, tuple(rows), runs, seconds))
    if len(bundles) == 1:
        return reports, {}
    before = {head.name: rounds for head, rounds in sides[1].items()}
    return reports, {
        head.name: ratio_in_turns(rounds, before[head.name])
        for head, rounds in sides[0].items()
        if head.name in before
    }


def ratio_in_turns(after: Sequence[Sequence[float]], before: Sequence[Sequence[float]]) -> Ratio:
    """How two sides compare that took turns: by the ratio of their medians in each round.

    Args:
        after: the samples of each round; rounds in which a side has none do not count.
        before: the same of the other side.
    """
    pairs = [(new, old) for new, old in zip(after, before, strict=True) if new and old]
    ratios = sorted(quantile(sorted(new), 0.5) / quantile(sorted(old), 0.5) for new, old in pairs)
    outer = 0.25 if len(ratios) >= MIN_QUARTILE_SAMPLES else 0.0
    return Ratio(
        least=min(min(new) for new, _ in pairs) / min(min(old) for _, old in pairs),
        middle=quantile(ratios, 0.5),
        low=quantile(ratios, outer),
        high=quantile(ratios, 1 - outer),
    )


def _row(head: Head, rounds: Iterable[Sequence[float]]) -> Row:
    samples = [sample for samples in rounds for sample in samples]
    return summarize(
        head.group,
        head.name,
        head.work,
        samples,
        unit=head.unit,
        items=head.items,
        item=head.item,
    )


def _report(bundle: Bundle, rows: tuple[Row, ...], runs: int, seconds: float) -> Report:
    packages = ("prejit", "jax", "jaxlib", "numpy")
    machine = {name: value for name, value in asdict(Fingerprint.current()).items() if value}
    return Report(
        report_version=REPORT_VERSION,
        bundle=bundle.name,
        digest=bundle.digest,
        target=bundle.target,
        matched=bundle.matched,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=json.loads(json.dumps(machine)),  # tuples are lists in a file
        versions={
            "python": ".".join(map(str, sys.version_info[:3])),
            **{name: metadata.version(name) for name in packages},
        },
        runs=runs,
        seconds=seconds,
        programs=bundle.report(),
        rows=rows,
    )


# ---------------------------------------------------------------------- rounds


@dataclass(slots=True)
class _Turns:
    """The probes of one thing, one of each side, and its account of time.

    Attributes:
        probes: with the number of their side.
        credit: seconds that it may still take.
        spent, calls: so far.
        rounds: in which it had a turn.
    """

    probes: list[tuple[int, Probe]]
    credit: float = 0.0
    spent: float = 0.0
    calls: int = 0
    rounds: int = 0

    def repeats(self, share: float, least_rounds: int) -> int:
        """How many calls its next turn has, given another share of the time."""
        self.credit += share
        affordable = int(self.credit * self.calls / self.spent) if self.calls else 1
        return min(_MAX_REPEATS, max(affordable, self.rounds < least_rounds))

    def take(self, repeats: int, found: Sequence[Rounds], share: float) -> None:
        """Adds samples to the last round of each side."""
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
        # What is too quick to use up its share saves nothing.
        self.credit = min(self.credit - took, share)


def _in_rounds(sides: Sequence[Sequence[Probe]], seconds: float, say: Say) -> list[Rounds]:
    """Runs the probes of all sides for some seconds, in turns; gives each side's samples."""
    things: dict[str, _Turns] = {}
    for side, probes in enumerate(sides):
        for probe in probes:
            things.setdefault(probe.heads[0].name, _Turns([])).probes.append((side, probe))
    for number, (name, thing) in enumerate(things.items(), 1):
        say(f"first calls: {number} of {len(things)}: {name}")
        for _, probe in thing.probes:
            probe.run()  # loads programs, which the second call need not do
    found: list[Rounds] = [{h: [] for p in probes for h in p.heads} for probes in sides]
    turns = list(things.values())
    share = seconds / _ROUNDS / sum(thing.probes[0][1].weight for thing in turns)
    order = _random(SEED)
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


def _timed(function: Callable[[], object]) -> Callable[[], Sequence[Sequence[float]]]:
    def run_once() -> Sequence[Sequence[float]]:
        started = time.perf_counter()
        function()
        return [[time.perf_counter() - started]]

    return run_once


def _probes(bundle: Bundle) -> Iterable[Probe]:
    """Everything that is measured of a bundle in this process."""
    yield _yardstick()
    if bundle.config.decoder is not None:
        decoder = bundle.decoder
        yield from _latency(decoder)
        yield _serving(decoder)
        yield from _programs(decoder)
    if bundle.config.encoder is not None:
        bundle.prepare()  # or a thread of the encoder's would do it meanwhile
        yield from _encoding(bundle.encoder)
    for program in bundle.config.programs:
        if program.kind == "call":
            yield _runner(bundle, program)


def _yardstick() -> Probe:
    """NumPy's sum of an array larger than caches, in one thread: bandwidth and a share of the CPU."""
    array = np.ones(_YARDSTICK_BYTES // 4, np.float32)
    head = Head("machine", YARDSTICK, "NumPy's sum of float32, one thread")
    return Probe((head,), _timed(array.sum))


def _runner(bundle: Bundle, program: Program) -> Probe:
    sizes = ", ".join(f"{name} {size}" for name, size in program.bucket.items())
    # A manifest names programs as it likes, `load` and `peak RSS` too.
    head = Head("call", f"call {program.name}", f"a call on zeros{f' ({sizes})' if sizes else ''}")
    return Probe((head,), _timed(bundle.runner_with_zeros(program)))


def _encoding(encoder: EncoderPrograms) -> Iterable[Probe]:
    """Sentences that fill each shape, and sentences of mixed lengths; token ids, no tokenizer."""
    for bucket in encoder.buckets:
        lengths = [bucket.length] * bucket.batch
        yield _sentences(encoder, f"encode {bucket}", lengths, with_padding=False)
    order = _random(SEED)
    longest = min(_SENTENCE_TOKENS, encoder.max_tokens)
    lengths = [_log_uniform(order, min(4, longest), longest) for _ in range(_SENTENCES)]
    name = f"encode {_SENTENCES} of mixed lengths"
    yield _sentences(encoder, name, lengths, with_padding=True)


def _sentences(
    encoder: EncoderPrograms, name: str, lengths: Sequence[int], *, with_padding: bool
) -> Probe:
    vocab = encoder.encoder.vocab_size
    sentences = [_prompt(length, vocab, seed) for seed, length in enumerate(lengths)]
    work = f"{len(lengths)} sentences, {sum(lengths)} tokens, in the cheapest shapes"
    heads = (
        Head("encode", name, work, items=len(lengths), item="sentences"),
        Head("encode", f"{name}, padding", f"{work}; tokens computed for each needed", "x"),
    )
    wanted = heads if with_padding else heads[:1]

    def run_once() -> Sequence[Sequence[float]]:
        started = time.perf_counter()
        _, stats = encoder.encode(sentences)
        samples = [time.perf_counter() - started], [1 / (1 - stats.padding)]
        return samples[: len(wanted)]

    return Probe(wanted, run_once)


# ---------------------------------------------------------------------- requests


def _random(seed: int) -> random.Random:
    return random.Random(seed)  # noqa: S311 (for equal work in every run, not for secrets)


def _log_uniform(order: random.Random, least: int, most: int) -> int:
    """Short ones are as common as people make them."""
    return round(math.exp(order.uniform(math.log(least), math.log(most))))


def _prompt(length: int, vocab_size: int, seed: int) -> list[int]:
    """Tokens that no other seed begins with: nothing is shared."""
    order = _random(SEED * 1_000 + seed)
    return [order.randrange(vocab_size) for _ in range(length)]


def _latency(decoder: DecoderPrograms) -> Iterable[Probe]:
    """First tokens for each length of prompt, and further tokens for each batch."""
    longest = decoder.contexts[-1]
    lengths = [length for length in _PROMPTS if length < longest] or [longest]
    for length in lengths:
        yield _request(decoder, 1, length, 1)
    shortest = max(1, min(lengths[0], longest - _NEW_TOKENS))
    new_tokens = min(_NEW_TOKENS, longest - shortest + 1)
    for rows in sorted({1, *decoder.batches}) if new_tokens > 1 else ():
        yield _request(decoder, rows, shortest, new_tokens)


def _request(decoder: DecoderPrograms, rows: int, length: int, new_tokens: int) -> Probe:
    """Requests that begin together in slots of their own, each step timed."""
    vocab = decoder.decoder.vocab_size
    requests = [
        Request(_prompt(length, vocab, row), max_new_tokens=new_tokens, stop_token_ids=())
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
    """Requests of different lengths that arrive at once and take as many slots as there are."""
    longest = decoder.contexts[-1]
    order = _random(SEED)
    top = max(1, min(_REQUEST_TOKENS, longest // 2))
    most = min(_NEW_TOKENS, longest - top)
    sizes = [(_log_uniform(order, 1, top), order.randint(1, most)) for _ in range(_REQUESTS)]
    vocab = decoder.decoder.vocab_size
    requests = [
        Request(_prompt(prompt, vocab, seed), max_new_tokens=new, stop_token_ids=())
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


# ---------------------------------------------------------------------- programs


def _programs(decoder: DecoderPrograms) -> Iterable[Probe]:
    """Each program by itself; those of a bucket share a cache. In prefill all rows are full."""
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
    if decoder.copies:
        for (batch, context), cache in caches.items():
            if (longer := decoder.context_for(context + 1)) > context:
                yield _growth(decoder, batch, longer, cache)


def _fixed(decoder: DecoderPrograms, batch: int) -> dict[str, DeviceArray]:
    """Sampling arguments and a history of the caller's own: programs may donate it."""
    history = decoder.device.put(np.zeros((batch, decoder.decoder.vocab_size), np.int32))
    return {**place_sampling(decoder, [Sampling()] * batch, [0] * batch), "history": history}


def _tokens(decoder: DecoderPrograms, *shape: int) -> DeviceArray:
    values = np.random.default_rng(SEED).integers(0, decoder.decoder.vocab_size, shape, np.int32)
    return decoder.device.put(values)


def _prefill(decoder: DecoderPrograms, program: Program, cache: KVCache) -> Probe:
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


def _decode(decoder: DecoderPrograms, program: Program, cache: KVCache) -> Probe:
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
        to_numpy(results.get("tokens", results.get("token")))
        seconds = (time.perf_counter() - started) / steps
        inputs["history"] = results.get("history", inputs["history"])
        steps = steps_per_call(seconds, most)
        return [[seconds]]

    work = f"at position {context // 2}; several steps a call where they are quick"
    return Probe((Head("decode", program.name, work, items=batch, item="tokens"),), run_once)


def _verify(decoder: DecoderPrograms, program: Program, cache: KVCache) -> Probe:
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
        # A GPU works in order, and to read from it costs more than to grow; on a CPU reading is free.
        for array in arrays if decoder.device.platform == "cpu" else arrays[-1:]:
            to_numpy(array)

    head = Head("growth", f"b{batch}: c{cache.context} to c{longer}", "all arrays of a cache")
    return Probe((head,), _timed(grow))


# ---------------------------------------------------------------------- fresh processes


def _fresh_processes(
    setups: Sequence[Setup], bundles: Sequence[Bundle], runs: int, say: Say
) -> list[Rounds]:
    """Starts and memory of processes that load a bundle and use it once, after one that warms caches."""
    uses = [_use_once(bundle) for bundle in bundles]
    found: list[Rounds] = [{} for _ in setups]
    for number in range(runs + 1):
        say(f"start-up: fresh process {number + 1} of {runs + 1}")
        sides = list(range(len(setups)))
        for side in sides if number % 2 else sides[::-1]:
            what, use = uses[side]
            facts = _fresh_process(setups[side], use)
            for fact, head in _fresh_heads(what).items():
                if number and facts[fact] is not None:
                    found[side].setdefault(head, []).append([facts[fact]])
    return found


def _fresh_heads(what: str) -> dict[str, Head]:
    """The row of each fact that a fresh process gives."""
    return {
        "first_seconds": Head("start-up", "exec to first result", what),
        "load_seconds": Head("start-up", "load", what),
        "peak_bytes": Head("memory", "peak RSS", what, "bytes"),
        "private_bytes": Head("memory", "private", what, "bytes"),
        "device_bytes": Head("memory", "device", what, "bytes"),
    }


def _use_once(bundle: Bundle) -> tuple[str, dict[str, Any]]:
    """What a fresh process shall do, in words and as bench_child.py wants it."""
    if bundle.config.decoder is not None:
        decoder = bundle.decoder
        length = max(1, min(_PROMPTS[0], decoder.contexts[-1] // 2))
        new_tokens = min(_NEW_TOKENS, decoder.contexts[-1] - length)
        prompt = _prompt(length, decoder.decoder.vocab_size, 0)
        what = f"a prompt of {length} tokens; {new_tokens} new ones"
        return what, {"program": None, "prompt": prompt, "new_tokens": new_tokens}
    if bundle.config.encoder is not None:
        length = min(_PROMPTS[0], bundle.encoder.max_tokens)
        sentence = _prompt(length, bundle.encoder.encoder.vocab_size, 0)
        what = f"a sentence of {length} tokens"
        return what, {"program": None, "prompt": sentence, "new_tokens": 0}
    programs = [program for program in bundle.config.programs if program.kind == "call"]
    smallest = min(programs, key=lambda program: math.prod(program.bucket.values()))
    what = f"{smallest.name} on zeros"
    return what, {"program": smallest.name, "prompt": [], "new_tokens": 0}


def _fresh_process(setup: Setup, use: Mapping[str, Any]) -> dict[str, Any]:
    given = json.dumps({**asdict(setup), **use})
    command = [sys.executable, "-m", "prejit.runtime.bench.child", given]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ProcessError(
            f"{setup.path}: a fresh process ended with {done.returncode}: {done.stderr[-500:].strip()}",
            done.returncode,
            hint="`prejit generate` or `prejit call` on this bundle may say more",
        )
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts
