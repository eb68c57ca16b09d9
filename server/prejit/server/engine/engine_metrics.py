"""The figures of an engine as callers get them, and their histograms.

Histograms have all bounds of vLLM's, so that its dashboards show prejit too, and finer ones below them,
because small models give a token in a few milliseconds.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Literal, NamedTuple, final


def _bounds(numbers: str) -> tuple[float, ...]:
    return tuple(map(float, numbers.split()))


FIRST_TOKEN_BOUNDS = _bounds(
    "0.001 0.0025 0.005 0.0075 0.01 0.015 0.02 0.03 0.04 0.06 0.08 0.1 0.25 0.5 0.75 "
    "1 2.5 5 7.5 10 20 40 80 160 640 2560"
)
"""Bounds in seconds of the time to the first token."""

TOKEN_BOUNDS = _bounds(
    "0.0005 0.001 0.002 0.003 0.004 0.005 0.0075 0.01 0.015 0.02 0.025 0.035 0.05 0.075 "
    "0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80"
)
"""Bounds in seconds of the time between tokens."""

REQUEST_BOUNDS = _bounds(
    "0.001 0.0025 0.005 0.01 0.025 0.05 0.1 0.2 0.3 0.5 0.8 1 1.5 2 2.5 5 10 "
    "15 20 30 40 50 60 120 240 480 960 1920 7680"
)
"""Bounds in seconds of a request and of its parts."""

COUNT_BOUNDS = _bounds("1 2 5 10 20 50 100 200 500 1000 2000 5000 10000 20000 50000 100000 200000")
"""Bounds of numbers of tokens."""


@dataclass(frozen=True, slots=True)
class HistogramValue:
    """The state of a histogram.

    Attributes:
        bounds: upper bounds of the buckets, ascending, without infinity. A value on a bound is below it.
        counts: how many values each bucket has (not cumulative); one more than there are bounds.
        sum: the sum of all values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float

    @property
    def count(self) -> int:
        """The number of values."""
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """The mean of all values; NaN if there are none."""
        return self.sum / self.count if self.count else math.nan

    def plus(self, other: HistogramValue) -> HistogramValue:
        """Return the histogram of the values of both, which have the same bounds."""
        counts = tuple(map(operator.add, self.counts, other.counts))
        return HistogramValue(self.bounds, counts, self.sum + other.sum)

    def quantile(self, share: float) -> float:
        """Return an estimate of a quantile, 0 to 1, as Prometheus does: linear inside a bucket.

        Returns:
            NaN if there are no values. The largest bound if the quantile is above it.
        """
        rank, seen, lower = share * self.count, 0, 0.0
        if not self.count:
            return math.nan
        for bound, count in zip(self.bounds, self.counts, strict=False):
            if count and seen + count >= rank:
                return lower + (bound - lower) * max(0.0, rank - seen) / count
            seen, lower = seen + count, bound
        return lower


@final
class Histogram:
    """A histogram that one thread writes and any thread may read."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """Begin with no values."""
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Add a value, or the same value several times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def snapshot(self) -> HistogramValue:
        """Return the current state."""
        return HistogramValue(self._bounds, tuple(self._counts), self._sum)


Kind = Literal["generate", "encode", "call"]
"""Kinds of requests: a generation, an encoding, or a call of one of the user's functions."""

GOOD_REASONS = ("stop", "length", "context", "mask", "done")
"""Reasons of requests that ended well. `done` is that of encodings and of calls."""

REASONS = (*GOOD_REASONS, "nan", "cancelled", "deadline", "error", "refused")
"""Every reason for which a request ends. All are counted from the start, so that rates are defined."""


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Counts of all generations, of all encodings, or of the calls of one function; and their state now.

    Histograms have one value for each request that ended by itself; requests that were cancelled, refused or
    failed count in `finished` alone.

    Attributes:
        kind: what they ask for.
        program: the function; `generate` and `encode` for the other kinds.
        queue_size: requests that can wait at a time.
        running: requests that run: a generation has a slot, or a run has rows of the call.
        waiting: requests in the queue.
        finished: requests by the reason for which they ended; every one of REASONS is there.
        waited_for_compile: requests that ended and waited for the compilation of a program.
        queue_seconds: time from a request until it runs.
        run_seconds: time in which it was computed.
        whole_seconds: time from a request to its result.
        busy_seconds: time in which a program ran for them.
        runs: runs of the program, which requests share: the steps of a batch of generations.
        rows: rows of requests in these runs; 0 for a function without a batch axis.
        padded_rows: rows of these runs that only filled the bucket.
        useful_positions: positions of tokens that were computed for requests that ended; 0 for a function.
        computed_positions: the same, padding included.
    """

    kind: Kind
    program: str
    queue_size: int
    running: int
    waiting: int
    finished: Mapping[str, int]
    waited_for_compile: int
    queue_seconds: HistogramValue
    run_seconds: HistogramValue
    whole_seconds: HistogramValue
    busy_seconds: float
    runs: int
    rows: int
    padded_rows: int
    useful_positions: int
    computed_positions: int

    @property
    def succeeded(self) -> int:
        """The number of requests that ended well."""
        return sum(self.finished[reason] for reason in GOOD_REASONS)

    @property
    def failed(self) -> int:
        """The number of requests that have no result, without those that callers cancelled."""
        return sum(self.finished.values()) - self.finished["cancelled"] - self.succeeded


class SleepMetrics(NamedTuple):
    """Sleeps of an engine.

    Attributes:
        is_sleeping: whether it sleeps now.
        sleeps, wakes: how often it went to sleep, and woke up.
        wake_seconds: time from the request that found it asleep until the end of its first run.
    """

    is_sleeping: bool
    sleeps: int
    wakes: int
    wake_seconds: HistogramValue


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """Counts of an engine since it was made, and its state now. Counts only grow.

    Attributes:
        requests: figures of each kind of requests: generations, encodings, and the calls of each function.
        slots: generations that can run at a time; None: the bundle has no decoder.
        kv_cache_usage: the share of the cache's positions that live requests use, 0 to 1.
        cache_bytes: memory of the KV caches; None: the bundle has no decoder.
        cache_budget_bytes: the most that they may use; None: no limit was set.
        prefix_bytes: memory of cached prefixes; None: the bundle has no decoder.
        prefix_budget_bytes: the most that they may use; None: the bundle has no decoder.
        prompt_tokens: tokens of all prompts that were read, cached ones included.
        cached_prompt_tokens: those of them that were in a cache already.
        generation_tokens: new tokens.
        first_token_seconds: time from the call to the first token.
        inter_token_seconds: time from one token of a request to the next.
        prefill_seconds: time in which its prompt was computed.
        decode_seconds: time of the decode calls that it was part of.
        prompt_length: tokens of a prompt, or of a sentence that was encoded.
        new_tokens: new tokens of a request.
        programs: programs of the bundle by how they became ready: loaded, compiled, kept, compiling, unused.
        compile_seconds: time that compiling took, over all programs.
        fallbacks: how many times each axis caused a fallback in this process.
        host_memory_bytes: resident memory of this process.
        device_memory_bytes: peak memory in use on the accelerator; None on a CPU.
        sleep: whether the engine sleeps, and how often it did.
    """

    requests: tuple[RequestMetrics, ...]
    slots: int | None
    kv_cache_usage: float
    cache_bytes: int | None
    cache_budget_bytes: int | None
    prefix_bytes: int | None
    prefix_budget_bytes: int | None
    prompt_tokens: int
    cached_prompt_tokens: int
    generation_tokens: int
    first_token_seconds: HistogramValue
    inter_token_seconds: HistogramValue
    prefill_seconds: HistogramValue
    decode_seconds: HistogramValue
    prompt_length: HistogramValue
    new_tokens: HistogramValue
    programs: Mapping[str, int]
    compile_seconds: float
    fallbacks: Mapping[str, int]
    host_memory_bytes: int
    device_memory_bytes: int | None
    sleep: SleepMetrics

    @property
    def running(self) -> int:
        """The number of requests of all kinds that run."""
        return sum(each.running for each in self.requests)

    @property
    def waiting(self) -> int:
        """The number of requests of all kinds that wait."""
        return sum(each.waiting for each in self.requests)

    @property
    def finished(self) -> Mapping[str, int]:
        """Requests of all kinds by the reason for which they ended; every one of REASONS is there."""
        found = Counter(dict.fromkeys(REASONS, 0))
        for each in self.requests:
            found.update(each.finished)
        return found

    @property
    def encoded_tokens(self) -> int:
        """The number of tokens of all sentences that were encoded."""
        return sum(each.useful_positions for each in self.requests if each.kind == "encode")

    @property
    def queue_seconds(self) -> HistogramValue:
        """Time from a request of any kind until it runs."""
        return _sum(each.queue_seconds for each in self.requests)

    @property
    def whole_seconds(self) -> HistogramValue:
        """Time from a request of any kind to its result."""
        return _sum(each.whole_seconds for each in self.requests)


def _sum(histograms: Iterable[HistogramValue]) -> HistogramValue:
    return reduce(HistogramValue.plus, histograms, Histogram(REQUEST_BOUNDS).snapshot())
