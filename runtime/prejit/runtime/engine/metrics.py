"""The figures of an engine: `EngineMetrics` for callers, `Recorder` for the loop that counts.

The histograms have all bounds of vLLM's, so that its dashboards show prejit too, and finer ones below them,
because small models give a token in a few milliseconds.
"""

from __future__ import annotations

import math
import os
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, final

from prejit.runtime.base.process import text_of

if TYPE_CHECKING:
    from prejit.runtime.generation.generate import Stats
    from prejit.runtime.programs.ready import ProgramReport

FIRST_TOKEN_BOUNDS = (
    *(
        0.001,
        0.0025,
        0.005,
        0.0075,
        0.01,
        0.015,
        0.02,
        0.03,
        0.04,
        0.06,
        0.08,
        0.1,
        0.25,
        0.5,
        0.75,
    ),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
"""Bounds in seconds of the time to the first token."""

TOKEN_BOUNDS = (
    *(
        0.0005,
        0.001,
        0.002,
        0.003,
        0.004,
        0.005,
        0.0075,
        0.01,
        0.015,
        0.02,
        0.025,
        0.035,
        0.05,
        0.075,
    ),
    *(0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
"""Bounds in seconds of the time between tokens."""

REQUEST_BOUNDS = (
    *(
        0.001,
        0.0025,
        0.005,
        0.01,
        0.025,
        0.05,
        0.1,
        0.2,
        0.3,
        0.5,
        0.8,
        1.0,
        1.5,
        2.0,
        2.5,
        5.0,
        10.0,
    ),
    *(15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
"""Bounds in seconds of a request and of its parts."""

COUNT_BOUNDS = tuple(
    float(step * 10**power)
    for power in range(6)
    for step in (1, 2, 5)
    if step * 10**power <= 200000
)
"""Bounds of numbers of tokens: 1, 2, 5, 10 and so on up to 200,000."""

REASONS = (
    "stop",
    "length",
    "context",
    "mask",
    "nan",
    "cancelled",
    "deadline",
    "error",
    "refused",
)
"""Every reason for which a request ends. All are counted from the start, so that rates are defined."""


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

    def quantile(self, share: float) -> float:
        """Return an estimate of a quantile, as Prometheus does: linear inside a bucket.

        Args:
            share: 0 to 1.

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
        """Begin with no values.

        Args:
            bounds: upper bounds of the buckets, ascending, without infinity.
        """
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


@dataclass(frozen=True, slots=True)
class MicroMetrics:
    """Counts of the shared calls of one program.

    Attributes:
        name: the program, or `encode`.
        calls: calls of callers that have a result.
        rows: rows of callers in them; 0 for a program without a batch axis.
        padded_rows: rows that only filled the bucket.
        batches: runs of the program; fewer than `calls` where callers shared one.
    """

    name: str
    calls: int
    rows: int
    padded_rows: int
    batches: int = 0


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """Counts of an engine since it was made, and its state now.

    Counts only grow. Histograms of a request's times have one value for each request that ended by itself;
    requests that were cancelled, refused or failed count in `finished` alone.

    Attributes:
        running: requests with a slot.
        waiting: requests in the queue.
        slots: requests that can run at a time.
        queue_size: requests that can wait at a time.
        kv_cache_usage: the share of the cache's positions that live requests use, 0 to 1.
        cache_bytes: memory of the KV caches.
        cache_budget_bytes: the most that they may use; None: no limit was set.
        prefix_bytes: memory of cached prefixes.
        prefix_budget_bytes: the most that they may use.
        prompt_tokens: tokens of all prompts that were read, cached ones included.
        cached_prompt_tokens: those of them that were in a cache already.
        generation_tokens: new tokens.
        computed_positions: positions that the programs computed for requests that ended, padding included.
        useful_positions: those of them that belonged to a request.
        finished: requests by the reason for which they ended; every one of REASONS is there.
        waited_for_compile: requests that ended and waited for the compilation of a program.
        nan: requests that ended because the logits are not numbers.
        busy_seconds: time in which a program of the engine ran.
        steps: steps of the batch.
        batch_rows: sum over the steps of the requests that got tokens.
        batch_slots: sum over the steps that gave tokens of the rows of their bucket.
        first_token_seconds: time from the call to the first token.
        inter_token_seconds: time from one token of a request to the next.
        e2e_seconds: time from the call to the last token.
        queue_seconds: time from the call until the request had a slot.
        prefill_seconds: time in which its prompt was computed.
        decode_seconds: time of the decode calls that it was part of.
        prompt_length: tokens of a prompt.
        new_tokens: new tokens of a request.
        programs: programs of the bundle by how they became ready: loaded, compiled, kept, compiling, unused.
        compile_seconds: time that compiling took, over all programs.
        fallbacks: how many times each axis caused a fallback in this process.
        host_memory_bytes: resident memory of this process.
        device_memory_bytes: peak memory in use on the accelerator; None on a CPU.
        micro: the shared calls of the encoder and of the bundle's functions.
    """

    running: int
    waiting: int
    slots: int
    queue_size: int
    kv_cache_usage: float
    cache_bytes: int
    cache_budget_bytes: int | None
    prefix_bytes: int
    prefix_budget_bytes: int
    prompt_tokens: int
    cached_prompt_tokens: int
    generation_tokens: int
    computed_positions: int
    useful_positions: int
    finished: Mapping[str, int]
    waited_for_compile: int
    nan: int
    busy_seconds: float
    steps: int
    batch_rows: int
    batch_slots: int
    first_token_seconds: HistogramValue
    inter_token_seconds: HistogramValue
    e2e_seconds: HistogramValue
    queue_seconds: HistogramValue
    prefill_seconds: HistogramValue
    decode_seconds: HistogramValue
    prompt_length: HistogramValue
    new_tokens: HistogramValue
    programs: Mapping[str, int]
    compile_seconds: float
    fallbacks: Mapping[str, int]
    host_memory_bytes: int
    device_memory_bytes: int | None
    micro: tuple[MicroMetrics, ...]


@final
class Recorder:
    """Counts what an engine does. Every method may be called from any thread and takes about a microsecond.

    A request goes one of these ways:

        refused
        submitted, abandoned
        submitted, admitted, read_prompt, first_token, tokens..., finished
    """

    def __init__(self, slots: int, queue_size: int) -> None:
        """Begin with nothing counted.

        Args:
            slots: requests that can run at a time.
            queue_size: requests that can wait at a time.
        """
        self._lock = threading.Lock()
        self._slots, self._queue_size = slots, queue_size
        self._running = self._waiting = 0
        self._prompt = self._cached = self._generated = 0
        self._computed = self._useful = 0
        self._finished = dict.fromkeys(REASONS, 0)
        self._compiled = 0
        self._busy = 0.0
        self._steps = self._rows = self._row_slots = 0
        self._first = Histogram(FIRST_TOKEN_BOUNDS)
        self._between = Histogram(TOKEN_BOUNDS)
        self._whole = Histogram(REQUEST_BOUNDS)
        self._queue = Histogram(REQUEST_BOUNDS)
        self._prefill = Histogram(REQUEST_BOUNDS)
        self._decode = Histogram(REQUEST_BOUNDS)
        self._lengths = Histogram(COUNT_BOUNDS)
        self._news = Histogram(COUNT_BOUNDS)

    # ------------------------------------------------------------------ the way of a request

    def refused(self) -> None:
        """Count a request that never entered the queue: it is full, or the engine is closed."""
        with self._lock:
            self._finished["refused"] += 1

    def submitted(self) -> None:
        """Count a request that enters the queue."""
        with self._lock:
            self._waiting += 1

    def abandoned(self, reason: str) -> None:
        """Count a request that left the queue without a slot.

        Args:
            reason: `cancelled`, `deadline`, `error`, or `refused`: it made room for another client.
        """
        with self._lock:
            self._waiting -= 1
            self._finished[reason] += 1

    def admitted(self, seconds: float) -> None:
        """Count a request that gets a slot.

        Args:
            seconds: time since it was submitted.
        """
        with self._lock:
            self._waiting -= 1
            self._running += 1
            self._queue.observe(seconds)

    def read_prompt(self, tokens: int, cached: int) -> None:
        """Count a prompt that is in the cache now.

        Args:
            tokens: its length.
            cached: how many of its tokens were in a cache already.
        """
        with self._lock:
            self._prompt += tokens
            self._cached += cached

    def first_token(self, seconds: float) -> None:
        """Count the first token of a request.

        Args:
            seconds: time since it was submitted.
        """
        with self._lock:
            self._generated += 1
            self._first.observe(seconds)

    def tokens(self, count: int, seconds: float) -> None:
        """Count further tokens of one request that came together.

        Args:
            count: how many. Each gets the same share of the time.
            seconds: time since the request's tokens before them.
        """
        with self._lock:
            self._generated += count
            self._between.observe(seconds / count, count)

    def finished(self, reason: str, seconds: float, stats: Stats | None = None) -> None:
        """Count a request that leaves its slot.

        Args:
            reason: its finish reason, or `cancelled`, `deadline`, `error`.
            seconds: time since it was submitted.
            stats: what it cost; None if it did not end by itself.
        """
        with self._lock:
            self._running -= 1
            self._finished[reason] += 1
            if stats is None:
                return
            self._compiled += any(report.source == "compiled" for report in stats.obtained)
            self._whole.observe(seconds)
            self._prefill.observe(stats.prefill_seconds)
            self._decode.observe(stats.decode_seconds)
            self._lengths.observe(stats.prompt_tokens)
            self._news.observe(stats.new_tokens)
            # The last new token is never fed back, so nothing is computed for it.
            useful = stats.prompt_tokens - stats.reused_tokens + max(0, stats.new_tokens - 1)
            self._useful += useful
            self._computed += round(useful / (1 - stats.padding)) if stats.padding < 1 else 0

    # ------------------------------------------------------------------ the work of the device

    def step(self, rows: int, slots: int, seconds: float) -> None:
        """Count a step of the batch: prompts that are computed, or a decode call.

        Args:
            rows: the requests that got tokens from it.
            slots: the rows of its bucket; 0: it only computed prompts.
            seconds: how long it took.
        """
        with self._lock:
            self._steps += 1
            self._rows += rows
            self._row_slots += slots
            self._busy += seconds

    def busy(self, seconds: float) -> None:
        """Count time of the device for other calls: of an encoder, or of a function."""
        with self._lock:
            self._busy += seconds

    # ------------------------------------------------------------------ all of it

    def snapshot(
        self,
        *,
        kv_cache_usage: float,
        cache_bytes: int,
        cache_budget_bytes: int | None,
        prefix_bytes: int,
        prefix_budget_bytes: int,
        programs: Iterable[ProgramReport],
        fallbacks: Mapping[str, int],
        device_memory_bytes: int | None,
        micro: Iterable[MicroMetrics] = (),
    ) -> EngineMetrics:
        """Return what was counted, with the state of the engine's parts, which the caller reads."""
        reports = tuple(programs)
        with self._lock:
            return EngineMetrics(
                running=self._running,
                waiting=self._waiting,
                slots=self._slots,
                queue_size=self._queue_size,
                kv_cache_usage=kv_cache_usage,
                cache_bytes=cache_bytes,
                cache_budget_bytes=cache_budget_bytes,
                prefix_bytes=prefix_bytes,
                prefix_budget_bytes=prefix_budget_bytes,
                prompt_tokens=self._prompt,
                cached_prompt_tokens=self._cached,
                generation_tokens=self._generated,
                computed_positions=self._computed,
                useful_positions=self._useful,
                finished=MappingProxyType(dict(self._finished)),
                waited_for_compile=self._compiled,
                nan=self._finished["nan"],
                busy_seconds=self._busy,
                steps=self._steps,
                batch_rows=self._rows,
                batch_slots=self._row_slots,
                first_token_seconds=self._first.snapshot(),
                inter_token_seconds=self._between.snapshot(),
                e2e_seconds=self._whole.snapshot(),
                queue_seconds=self._queue.snapshot(),
                prefill_seconds=self._prefill.snapshot(),
                decode_seconds=self._decode.snapshot(),
                prompt_length=self._lengths.snapshot(),
                new_tokens=self._news.snapshot(),
                programs=MappingProxyType(dict(Counter(report.source for report in reports))),
                compile_seconds=sum(
                    (report.seconds for report in reports if report.source == "compiled"), 0.0
                ),
                fallbacks=MappingProxyType(dict(fallbacks)),
                host_memory_bytes=host_memory_bytes(),
                device_memory_bytes=device_memory_bytes,
                micro=tuple(micro),
            )


def host_memory_bytes() -> int:
    """Return the resident memory of this process."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def host_memory_limit_bytes(root: str = "/") -> int:
    """Return how much memory this process may use: the limit of its container, or the machine's memory.

    Args:
        root: the directory that holds `sys`. A container sees its own limit there.
    """
    limit: int = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("memory.max", "memory/memory.limit_in_bytes"):  # control groups 2 and 1
        text = text_of(os.path.join(root, "sys/fs/cgroup", path)).strip()
        if text.isdecimal():  # and not `max`
            limit = min(limit, int(text))
    return limit
