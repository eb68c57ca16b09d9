"""The figures of an engine as callers get them: `EngineMetrics`, with a `RequestMetrics` for each program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Literal

from prejit.server.engine.histograms import REQUEST_BOUNDS, Histogram, HistogramValue
from prejit.server.engine.sleeper import SleepMetrics

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
