"""Recorders: what the parts of an engine count into, from any thread."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, final

from prejit.runtime.programs.usage_hint import functions_of
from prejit.server.engine.engine_metrics import (
    COUNT_BOUNDS,
    FIRST_TOKEN_BOUNDS,
    REASONS,
    REQUEST_BOUNDS,
    TOKEN_BOUNDS,
    EngineMetrics,
    Histogram,
    HistogramValue,
    Kind,
    RequestMetrics,
)
from prejit.server.engine.memory import host_memory_bytes

if TYPE_CHECKING:
    from prejit.runtime.format.bundle_schema import Config
    from prejit.runtime.generation.finished_text import Stats
    from prejit.runtime.programs.ready_programs import ProgramReport

GENERATE: tuple[Kind, str] = ("generate", "generate")
"""Kind and program of generations."""
ENCODE: tuple[Kind, str] = ("encode", "encode")
"""Kind and program of encodings."""


def kinds_of(config: Config) -> tuple[tuple[Kind, str], ...]:
    """Return the kinds of requests that a bundle takes, each with its program."""
    return (
        *((GENERATE,) if config.decoder is not None else ()),
        *((ENCODE,) if config.encoder is not None else ()),
        *(("call", name) for name in functions_of(config.programs)),
    )


class Cost(NamedTuple):
    """The cost of a run of a program.

    Attributes:
        padded_rows: rows that only filled the bucket.
        runs: how many runs of the program it was.
        useful_positions: positions of tokens of its requests.
        computed_positions: the same, padding included.
        sentence_tokens: tokens of each sentence that it encoded.
    """

    padded_rows: int = 0
    runs: int = 1
    useful_positions: int = 0
    computed_positions: int = 0
    sentence_tokens: tuple[int, ...] = ()


class Observed(NamedTuple):
    """A step of a batch, or a request, that has ended just now.

    Attributes:
        what: `step`, or the kind and the program of a request: `generate`, `call score`.
        parts: the parts of it, the first one first, with the seconds that each took.
        rows: requests of the step; new tokens of a generation.
    """

    what: str
    parts: tuple[tuple[str, float], ...]
    rows: int = 1


Observe = Callable[[Observed], object]
"""Takes what ends while somebody looks. It is called with locks held, and must be quick."""

ONE_RUN = Cost()
"""The cost of most runs: they pad nothing."""


@final
class RequestRecorder:
    """Counts requests of one kind. Every method may be called from any thread and takes about a microsecond.

    A request goes one of these ways:

        refused
        submitted, abandoned
        submitted, admitted, finished
        began, ran_at_once            in its caller's thread
        began, finished               the same, without a result
        began, withdrawn              the same, with wrong arguments

    Attributes:
        lock: protects the counts. A part that has a lock of its own may use this one.
        observe: takes each request that has a result; None: nobody looks.
    """

    observe: Observe | None = None

    def __init__(self, kind: Kind, program: str, queue_size: int) -> None:
        """Begin with nothing counted. For the arguments see `RequestMetrics`."""
        self.lock = threading.RLock()
        self._named: tuple[Kind, str] = (kind, program)
        self._queue_size = queue_size
        self._running = self._waiting = 0
        self._finished = dict.fromkeys(REASONS, 0)
        self._compiled = 0
        self._queue = Histogram(REQUEST_BOUNDS)
        self._run = Histogram(REQUEST_BOUNDS)
        self._whole = Histogram(REQUEST_BOUNDS)
        self._at_once = Histogram(REQUEST_BOUNDS)  # to count these in one place takes half the time
        self._busy = 0.0
        self._runs = self._rows = self._padded_rows = 0
        self._useful = self._computed = 0
        self._lengths = Histogram(COUNT_BOUNDS)

    def refused(self) -> None:
        """Count a request that never entered the queue: it is full, or the engine is closed."""
        with self.lock:
            self._finished["refused"] += 1

    def submitted(self) -> None:
        """Count a request that enters the queue."""
        with self.lock:
            self._waiting += 1

    def abandoned(self, reason: str) -> None:
        """Count a request that left the queue without running; `refused`: it made room for another client."""
        with self.lock:
            self._waiting -= 1
            self._finished[reason] += 1

    def admitted(self, seconds: float) -> None:
        """Count a request that runs from now on, so many seconds after it was submitted."""
        with self.lock:
            self._waiting -= 1
            self._running += 1
            self._queue.observe(seconds)

    def began(self) -> None:
        """Count a request that runs at once. The caller holds the lock."""
        self._running += 1

    def ran_at_once(
        self,
        reason: str,
        seconds: float,
        rows: int,
        cost: Cost,
        busy_seconds: float,
        waited_for_compile: bool,
    ) -> None:
        """Count a request that ran at once and has its result, `done` or `nan`, and its run.

        Arguments as of `ran` and `finished`. The caller holds the lock.
        """
        self._running -= 1
        self._finished[reason] += 1
        self._at_once.observe(seconds)
        if self.observe is not None:
            self.observe(Observed(" ".join(self._named), (("run", seconds),), rows))
        self._compiled += waited_for_compile
        self._rows += rows
        self._busy += busy_seconds
        if cost is ONE_RUN:
            self._runs += 1
        else:
            self.ran(0, cost)

    def withdrawn(self) -> None:
        """Forget a request that `began` has counted."""
        with self.lock:
            self._running -= 1

    def finished(
        self,
        reason: str,
        seconds: float,
        run_seconds: float | None = None,
        *,
        waited_for_compile: bool = False,
    ) -> None:
        """Count a request that does not run any more.

        Args:
            reason: one of REASONS.
            seconds: time since it was submitted.
            run_seconds: time in which it was computed; None: it did not end by itself.
            waited_for_compile: whether it waited for the compilation of a program.
        """
        with self.lock:
            self._running -= 1
            self._finished[reason] += 1
            if self.observe is not None and run_seconds is not None:
                parts = (("queue", seconds - run_seconds), ("run", run_seconds))
                self.observe(Observed(" ".join(self._named), parts))
            if run_seconds is not None:
                self._compiled += waited_for_compile
                self._run.observe(run_seconds)
                self._whole.observe(seconds)

    def ran(self, rows: int, cost: Cost, busy_seconds: float = 0.0) -> None:
        """Count a run of the program.

        Args:
            rows: rows of requests in it.
            cost: what else it computed.
            busy_seconds: time in which no earlier run was under way.
        """
        with self.lock:
            self._rows += rows
            self._padded_rows += cost.padded_rows
            self._runs += cost.runs
            self._useful += cost.useful_positions
            self._computed += cost.computed_positions
            for tokens in cost.sentence_tokens:
                self._lengths.observe(tokens)
            self._busy += busy_seconds

    def computed(self, useful: int, computed: int) -> None:
        """Count positions of tokens that were computed for a request, without and with padding."""
        with self.lock:
            self._useful += useful
            self._computed += computed

    @property
    def live(self) -> int:
        """The number of requests that wait or run."""
        return self._waiting + self._running

    def sentence_lengths(self) -> HistogramValue:
        """Return the distribution of the tokens of the sentences that were encoded."""
        with self.lock:
            return self._lengths.snapshot()

    def snapshot(self) -> RequestMetrics:
        """Return what was counted."""
        kind, program = self._named
        with self.lock:
            at_once = self._at_once.snapshot()
            queue = Histogram(REQUEST_BOUNDS)
            queue.observe(0.0, at_once.count)
            return RequestMetrics(
                kind=kind,
                program=program,
                queue_size=self._queue_size,
                running=self._running,
                waiting=self._waiting,
                finished=MappingProxyType(dict(self._finished)),
                waited_for_compile=self._compiled,
                queue_seconds=self._queue.snapshot().plus(queue.snapshot()),
                run_seconds=self._run.snapshot().plus(at_once),
                whole_seconds=self._whole.snapshot().plus(at_once),
                busy_seconds=self._busy,
                runs=self._runs,
                rows=self._rows,
                padded_rows=self._padded_rows,
                useful_positions=self._useful,
                computed_positions=self._computed,
            )


@final
class Recorder:
    """Counts what an engine does: requests of every kind, and the tokens of generations."""

    _observe: Observe | None = None

    def __init__(
        self, slots: int, queue_size: int, programs: Iterable[tuple[Kind, str]] = (GENERATE,)
    ) -> None:
        """Begin with nothing counted."""
        self._lock = threading.Lock()
        self._slots, self._queue_size = slots, queue_size
        self._each: dict[tuple[Kind, str], RequestRecorder] = {}
        for kind, program in programs:
            self.requests(kind, program)
        self._generates = GENERATE in self._each
        self.generations = (
            self._each[GENERATE] if self._generates else RequestRecorder(*GENERATE, queue_size)
        )
        self._prompt = self._cached = self._generated = 0
        self._first = Histogram(FIRST_TOKEN_BOUNDS)
        self._between = Histogram(TOKEN_BOUNDS)
        self._prefill = Histogram(REQUEST_BOUNDS)
        self._decode = Histogram(REQUEST_BOUNDS)
        self._lengths = Histogram(COUNT_BOUNDS)
        self._news = Histogram(COUNT_BOUNDS)

    def requests(self, kind: Kind, program: str) -> RequestRecorder:
        """Return what counts the requests of a kind and a program."""
        with self._lock:
            found = self._each.get((kind, program))
            if found is None:
                found = RequestRecorder(kind, program, self._queue_size)
                found.observe = None if kind == "generate" else self._observe
                self._each[kind, program] = found
            return found

    def live(self) -> int:
        """Return how many requests of all kinds wait or run."""
        with self._lock:
            return sum(each.live for each in self._each.values())

    def observe(self, observe: Observe | None) -> None:
        """Show each step and each request that ends from now on; None: to nobody any more."""
        with self._lock:
            self._observe = observe
            for one in self._each.values():
                one.observe = None if one is self.generations else observe

    # ------------------------------------------------------------------ the way of a generation

    def read_prompt(self, tokens: int, cached: int) -> None:
        """Count a prompt that is in the cache now; `cached` of its tokens were in a cache already."""
        with self._lock:
            self._prompt += tokens
            self._cached += cached

    def first_token(self, seconds: float) -> None:
        """Count the first token of a request, so many seconds after it was submitted."""
        with self._lock:
            self._generated += 1
            self._first.observe(seconds)

    def tokens(self, count: int, seconds: float) -> None:
        """Count further tokens of one request that came together, so long after those before them."""
        with self._lock:
            self._generated += count
            self._between.observe(seconds / count, count)

    def finished(self, reason: str, seconds: float, stats: Stats | None = None) -> None:
        """Count a generation that leaves its slot.

        Args:
            reason: its finish reason, or `cancelled`, `deadline`, `error`.
            seconds: time since it was submitted.
            stats: what it cost; None if it did not end by itself.
        """
        if stats is None:
            self.generations.finished(reason, seconds)
            return
        if self._observe is not None:
            run = stats.prefill_seconds + stats.decode_seconds
            parts = (("prefill", stats.prefill_seconds), ("decode", stats.decode_seconds))
            self._observe(
                Observed("generate", (("queue", seconds - run), *parts), stats.new_tokens)
            )
        # The last new token is never fed back, so nothing is computed for it.
        useful = stats.prompt_tokens - stats.reused_tokens + max(0, stats.new_tokens - 1)
        computed = round(useful / (1 - stats.padding)) if stats.padding < 1 else 0
        self.generations.computed(useful, computed)
        self.generations.finished(
            reason,
            seconds,
            stats.prefill_seconds + stats.decode_seconds,
            waited_for_compile=any(report.source == "compiled" for report in stats.obtained),
        )
        with self._lock:
            self._prefill.observe(stats.prefill_seconds)
            self._decode.observe(stats.decode_seconds)
            self._lengths.observe(stats.prompt_tokens)
            self._news.observe(stats.new_tokens)

    def step(self, rows: int, slots: int, seconds: float) -> None:
        """Count a step of the batch: prompts that are computed, or a decode call.

        Args:
            rows: the requests that got tokens from it.
            slots: the rows of its bucket; 0: it only computed prompts.
            seconds: how long it took.
        """
        self.generations.ran(rows, Cost(max(0, slots - rows)), seconds)
        if self._observe is not None:
            part = "decode" if slots else "prefill"
            self._observe(Observed("step", ((part, seconds),), rows))

    # ------------------------------------------------------------------ all of it

    def snapshot(self, *, programs: Sequence[ProgramReport], **state: Any) -> EngineMetrics:
        """Return what was counted, with the state of the engine's parts: the other fields of the metrics."""
        with self._lock:
            each = tuple(self._each.values())
        requests = tuple(one.snapshot() for one in each)
        sentences = [one.sentence_lengths() for one in each]
        with self._lock:
            return EngineMetrics(
                requests=requests,
                slots=self._slots if self._generates else None,
                prompt_tokens=self._prompt,
                cached_prompt_tokens=self._cached,
                generation_tokens=self._generated,
                first_token_seconds=self._first.snapshot(),
                inter_token_seconds=self._between.snapshot(),
                prefill_seconds=self._prefill.snapshot(),
                decode_seconds=self._decode.snapshot(),
                prompt_length=reduce(HistogramValue.plus, sentences, self._lengths.snapshot()),
                new_tokens=self._news.snapshot(),
                programs=MappingProxyType(dict(Counter(report.source for report in programs))),
                compile_seconds=sum(
                    (report.seconds for report in programs if report.source == "compiled"), 0.0
                ),
                host_memory_bytes=host_memory_bytes(),
                **state,
            )
