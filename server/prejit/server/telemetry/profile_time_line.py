"""The time line of a recording, in the trace format that Perfetto reads, and its longest parts as tables.

    requests   a lane for each that ran beside others: queue, prefill, decode
    steps      the steps of each engine
    programs   the runs of each program
    kernels    what XLA ran, a lane for each thread or stream

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (Chrome's JSON).
"""

from __future__ import annotations

import re
import warnings
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from prejit.runtime.device import _jax_parts
from prejit.server.telemetry.engine_profile import Spans

_GROUPS = ("requests", "steps", "programs", "kernels")
_LIBRARY = re.compile(r"^prejit_(\w+?)(?:[._][0-9a-f]{16})?$")
_WHOLE = ("while", "call", "cond")
"""How the names of instructions begin whose time is that of those inside of them."""
_MAX_WAITING = 64
"""Calls that still wait for their runs; older ones had no kernel."""


class XlaEvent(NamedTuple):
    """A kernel that ran.

    Attributes:
        lane: the thread or the stream that it ran on.
        kernel: its name in the optimized HLO.
        module: name of its HLO module.
        run: number of the run of the executable.
        start, end: nanoseconds since 1970.
    """

    lane: str
    kernel: str
    module: str
    run: int
    start: int
    end: int


class TimeLinePart(NamedTuple):
    """A part of the time line, in nanoseconds since 1970."""

    group: str
    lane: str
    name: str
    start: int
    end: int
    about: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True)
class Total:
    """The time of all runs of a program or of a kernel.

    Attributes:
        program: its name, or that of XLA's module where prejit did not see the call.
        kernel: of a kernel; empty: all of the program.
        place: jax's name of the kernel's operation.
        runs: how often it ran.
        seconds: of all runs together, on all threads.
        share: of programs, a part of the recorded time; of kernels, a part of all kernels' time.
    """

    program: str
    kernel: str
    place: str
    runs: int
    seconds: float
    share: float


@dataclass(frozen=True, slots=True)
class TimeLine:
    """A recording that was read.

    Attributes:
        seconds: its length.
        tokens: new tokens that clients got.
        parts: of the time line.
        programs, kernels: totals, the longest first.
    """

    seconds: float
    tokens: int
    parts: tuple[TimeLinePart, ...]
    programs: tuple[Total, ...]
    kernels: tuple[Total, ...]


def read_time_line(xspace: bytes, spans: Spans) -> TimeLine:
    """Return the time line of a recording."""
    events = sorted(xla_events(xspace), key=lambda event: event.start)
    spans = _without_model(spans)
    names = _program_names(events, spans)
    seconds = (spans.ended_ns - spans.started_ns) / 1e9
    programs = list(_programs(events, names))
    kernels = [_kernel(event, names, spans.kernels) for event in events]
    parts = (*_requests(spans), *_steps(spans), *programs, *kernels)
    computing = [each for each in kernels if not each.about["op"].startswith(_WHOLE)]
    return TimeLine(
        seconds,
        spans.tokens,
        parts,
        _totals((((each.name, "", ""), each) for each in programs), seconds),
        _totals(
            (((each.about["program"], each.name, each.about["place"]), each) for each in computing),
            sum(each.end - each.start for each in computing) / 1e9,
        ),
    )


def _without_model(spans: Spans) -> Spans:
    """Return spans whose programs have no name of a model, if all are of one."""
    models = {name.partition(": ")[0] for name in spans.kernels}
    if len(models) != 1:
        return spans
    start = f"{models.pop()}: "
    runs = [(name.removeprefix(start), at) for name, at in spans.runs]
    kernels = {name.removeprefix(start): found for name, found in spans.kernels.items()}
    return msgspec.structs.replace(spans, runs=runs, kernels=kernels)


def _program_names(events: Sequence[XlaEvent], spans: Spans) -> dict[int, str]:
    """Return the name of the program of each run, by XLA's number of the run.

    XLA does not know our names. Runs begin in the order of their calls, but for those that overtake others:
    a run belongs to the first call before it whose program has an instruction of that name. Runs that no call
    fits are of calls that jaxlib dispatched by itself, and have the name of XLA's module.
    """
    named: dict[int, str] = {}
    calls = iter(sorted(spans.runs, key=lambda call: call[1]))
    waiting: deque[str] = deque(maxlen=_MAX_WAITING)
    following = next(calls, None)
    for event in events:
        if event.run in named:
            continue
        while following is not None and following[1] <= event.start:
            waiting.append(following[0])
            following = next(calls, None)
        name = next((each for each in waiting if event.kernel in spans.kernels.get(each, ())), None)
        if name is not None:
            waiting.remove(name)
        named[event.run] = event.module if name is None else name
    return named


def _programs(events: Iterable[XlaEvent], names: Mapping[int, str]) -> Iterator[TimeLinePart]:
    """Yield the runs of programs: from the first kernel of each to the end of the last one."""
    spans: dict[int, tuple[XlaEvent, int]] = {}
    for event in events:
        begun, end = spans.get(event.run, (event, event.end))
        spans[event.run] = begun, max(end, event.end)
    for begun, end in spans.values():
        yield TimeLinePart("programs", "programs", names[begun.run], begun.start, end)


def _kernel(
    event: XlaEvent, names: Mapping[int, str], kernels: Mapping[str, Mapping[str, tuple[str, str]]]
) -> TimeLinePart:
    program = names[event.run]
    called, place = kernels.get(program, {}).get(event.kernel, ("", ""))
    native = _LIBRARY.match(called)
    name = native[1] if native else called or event.kernel
    about = {"program": program, "op": event.kernel, "place": place}
    return TimeLinePart("kernels", event.lane, name, event.start, event.end, about)


def _totals(
    parts: Iterable[tuple[tuple[str, str, str], TimeLinePart]], whole: float
) -> tuple[Total, ...]:
    runs: Counter[tuple[str, str, str]] = Counter()
    spent: defaultdict[tuple[str, str, str], float] = defaultdict(float)
    for key, part in parts:
        runs[key] += 1
        spent[key] += (part.end - part.start) / 1e9
    return tuple(
        Total(*key, runs[key], seconds, seconds / whole if whole else 0.0)
        for key, seconds in sorted(spent.items(), key=lambda item: -item[1])
    )


def _steps(spans: Spans) -> Iterator[TimeLinePart]:
    for model, part, start, end, rows in spans.steps:
        yield TimeLinePart("steps", model, part, start, end, {"rows": rows})


def _requests(spans: Spans) -> Iterator[TimeLinePart]:
    """Yield the parts of requests, in as few lanes as hold those that ran at once."""
    begun = []
    for model, what, end, parts, tokens in spans.requests:
        start = end - round(sum(seconds for _, seconds in parts) * 1e9)
        begun.append((start, end, f"{model}: {what}", parts, tokens))
    free: list[int] = []  # when the last request of each lane ends
    for start, end, name, parts, tokens in sorted(begun, key=lambda each: each[0]):
        place = next((n for n, ended in enumerate(free) if ended <= start), len(free))
        free[place : place + 1] = [end]
        lane = f"request {place + 1}"
        yield TimeLinePart("requests", lane, name, start, end, {"tokens": tokens})
        at = start
        for part, seconds in parts:
            until = at + max(0, round(seconds * 1e9))
            if until > at:
                yield TimeLinePart("requests", lane, part, at, until)
            at = until


def trace_events(found: TimeLine) -> dict[str, Any]:
    """Return a time line in Chrome's trace format, times in microseconds since the first part."""
    lanes: dict[tuple[str, str], int] = {}
    for part in found.parts:
        lanes.setdefault((part.group, part.lane), len(lanes) + 1)
    events: list[dict[str, Any]] = []
    for place, group in enumerate(_GROUPS, 1):
        events.append(_named("process_name", place, 0, group))
        events.append(
            {"ph": "M", "name": "process_sort_index", "pid": place, "args": {"sort_index": place}}
        )
    for (group, lane), number in lanes.items():
        events.append(_named("thread_name", _GROUPS.index(group) + 1, number, lane))
    first = min((part.start for part in found.parts), default=0)
    events += [
        {
            "ph": "X",
            "name": part.name,
            "cat": part.group,
            "pid": _GROUPS.index(part.group) + 1,
            "tid": lanes[part.group, part.lane],
            "ts": round((part.start - first) / 1e3, 3),
            "dur": round((part.end - part.start) / 1e3, 3),
            "args": dict(part.about),
        }
        for part in found.parts
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def xla_events(xspace: bytes) -> Iterator[XlaEvent]:
    """Yield the kernels of an XSpace."""
    data = _jax_parts.read_xspace(xspace)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # jaxlib's classes have no __module__
        planes = list(data.planes)
        started = next((found for each in planes if (found := _start(each)) is not None), 0)
        for plane in planes:
            for line in plane.lines:
                lane = f"{plane.name} {line.name}".strip("/")
                for event in line.events:
                    stats: dict[str, Any] = dict(event.stats)
                    if "hlo_op" not in stats:
                        continue
                    # A float of nanoseconds since 1970 has steps of 256 ns.
                    start = started + round(event.start_ns)
                    yield XlaEvent(
                        lane,
                        str(stats["hlo_op"]),
                        str(stats.get("hlo_module", "")),
                        int(stats.get("run_id", 0)),
                        start,
                        start + round(event.duration_ns),
                    )


def _start(plane: Any) -> int | None:
    """Return when the profile began, which the times of events count from; None: another plane says it."""
    found = dict(plane.stats).get("profile_start_time")
    return None if found is None else int(found)
