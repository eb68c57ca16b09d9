"""`prejit gate`: play the same requests to two bundles in processes of their own, in turns, and judge.

Two processes of one bundle differ in speed by a few percent. So each pair of processes is a group of its own,
pairs of the old bundle with itself show what difference means nothing here, and new pairs are started until
the intervals are narrow or the time is over. Its verdict is a table, JSON, Markdown or a page.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import msgspec
import numpy as np

from prejit.runtime.base.child_process import Child, last_line
from prejit.runtime.base.wording import few, shortened, table
from prejit.runtime.errors import PrejitError, UsageError, printable
from prejit.runtime.format.release_limits import ReleaseLimits
from prejit.runtime.machine.fleet_machines import Machine
from prejit.server.releases.measured_checks import (
    BundleAnswer,
    ComparedAnswers,
    Line,
    PairedTimes,
    RequestDifference,
    is_settled,
    limit_check,
    quick_enough,
    slower_check,
    time_checks,
    times_of,
)
from prejit.server.releases.release_contents import (
    ReleaseCheck,
    compare_contents,
    described_limits,
    growth_check,
    judged,
    read_release,
)
from prejit.server.releases.request_player import calls_of, can_play
from prejit.server.telemetry.requestlog import RecordedCall

_HEAD = ("check", "verdict", "old", "new", "why")
_TEMPLATE = Path(__file__).parent / "templates" / "gate.html"
_MOST_DIFFERENCES = 20
_WIDTH = 100
"""Maximum characters of a cell on a terminal."""

_MODULE = "prejit.server.http.gate_child"
_TIMED = 12
"""How many requests are played again and again for their times."""
_GROUP_SECONDS = 4.0
"""How long a pair of processes plays requests in turns."""
_LEAST_ROUNDS = 3
_MOST_ROUNDS = 60


@dataclass(frozen=True, slots=True)
class GateOptions:
    """The requests that a gate plays, and for how long.

    Attributes:
        lines: requests of a log.
        name: the name that they give as their model.
        max_tokens: the limit of new tokens of the server that wrote the log.
        machines: those of a fleet.
        seconds: how long it may measure.
        groups: the fewest pairs of processes whose times count; one less of the old bundle with itself.
        seed: of the requests of its own.
    """

    lines: Sequence[Line] = ()
    name: str = "model"
    max_tokens: int | None = None
    machines: Sequence[Machine] = ()
    seconds: float = 60.0
    groups: int = 3
    seed: int = 0


@dataclass(frozen=True, slots=True)
class GateVerdict:
    """The result of a gate.

    Attributes:
        old, new: the digests of the bundles; the new one is empty if it cannot be read.
        checks: every check, in order.
        limits: the limits that were applied.
        requests: how many requests both played.
        differences: the requests whose answers differ.
        seconds: how long it took.
    """

    old: str
    new: str
    checks: tuple[ReleaseCheck, ...]
    limits: ReleaseLimits
    requests: int
    differences: tuple[RequestDifference, ...]
    seconds: float

    @property
    def passed(self) -> bool:
        """True if no check failed."""
        return not self.failed

    @property
    def failed(self) -> tuple[ReleaseCheck, ...]:
        """The checks that failed."""
        return tuple(each for each in self.checks if each.outcome == "failed")


class _UnusableError(Exception):
    """A bundle cannot be loaded or stops answering; the text says why."""


@final
class _Process:
    """A process that has loaded a bundle and plays requests to it."""

    def __init__(self, path: str, options: GateOptions) -> None:
        """Start it. Raise _UnusableError if it cannot load the bundle."""
        given = (path, options.name, str(options.seed), str(options.max_tokens or 0))
        self._child = Child([sys.executable, "-P", "-m", _MODULE, *given], errors="kept")
        try:
            self.begun = self._answer()
        except BaseException:
            self._child.release()
            raise

    def play(self, line: Line) -> BundleAnswer:
        """Return what the bundle gives for a request."""
        self._child.send(line)
        found = self._answer()
        calls = tuple(msgspec.convert(each, RecordedCall) for each in found["calls"])
        times = found["seconds"], found["cpu_seconds"]
        return BundleAnswer(found["status"], calls, found["said"], *times)

    def peak_bytes(self) -> int:
        """Return the peak of its resident memory."""
        self._child.send(None)
        found: int = self._answer()
        return found

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *_: object) -> None:
        self._child.release()

    def _answer(self) -> Any:
        answer = self._child.answer()
        if answer is None:
            raise _UnusableError(
                f"its process ended: {last_line(self._child.errors()) or 'no message'}"
            )
        if isinstance(answer, Mapping) and "error" in answer:
            raise _UnusableError(f"{answer['code']}: {answer['error']}")
        return answer


def run_gate(old: str, new: str, options: GateOptions, show: Callable[[str], None]) -> GateVerdict:
    """Judge whether a bundle may take the place of another one.

    Args:
        old: the directory of the bundle that serves now.
        new: that of the release.
        options: what is played, and how long.
        show: takes lines of progress.

    Raises:
        UsageError: the old bundle cannot run here, so that there is nothing to compare with.
        RejectError, StoreError: the old bundle is damaged, or cannot be read.
    """
    return _Gate(old, new, options, show).run()


@final
class _Gate:
    def __init__(
        self, old: str, new: str, options: GateOptions, show: Callable[[str], None]
    ) -> None:
        self._old, self._new, self._options, self._show = old, new, options, show
        self._began = time.monotonic()
        self._checks: list[ReleaseCheck] = []
        self._answers = ComparedAnswers()
        self._times, self._noise = PairedTimes(), PairedTimes()
        self._starts: list[tuple[float, float]] = []
        self._same_starts: list[tuple[float, float]] = []
        self._peaks: list[tuple[int, int]] = []
        self._played: list[tuple[float, Line]] = []
        self._timed: list[Line] = []

    def run(self) -> GateVerdict:
        self._show("reading both bundles")
        old = read_release(self._old)
        limits, digest = old.limits, ""
        try:
            new = read_release(self._new)
        except PrejitError as error:
            self._checks.append(ReleaseCheck("opens", "failed", why=f"{error.code}: {error}"))
            return self._verdict(old.digest, digest, limits)
        digest = new.digest
        found, limits = compare_contents(old, new, self._options.machines)
        self._checks += found
        # To compile a whole model here would take long, and the verdict is clear without it.
        runs = not (new.why_not and not old.why_not) and self._compare(limits)
        if runs and not any(each.outcome == "failed" for each in self._checks):
            self._measure(limits)
            self._checks += time_checks(self._times, self._noise, limits)
            self._checks += self._process_checks(limits)
        elif digest:
            why = "not measured, because the release is stopped anyway"
            self._checks.append(ReleaseCheck("times", "noted", why=why))
        return self._verdict(old.digest, digest, limits)

    def _verdict(self, old: str, new: str, limits: ReleaseLimits) -> GateVerdict:
        return GateVerdict(
            old,
            new,
            tuple(self._checks),
            limits,
            self._answers.requests,
            tuple(self._answers.differences),
            time.monotonic() - self._began,
        )

    # ------------------------------------------------------------------ what they answer

    def _compare(self, limits: ReleaseLimits) -> bool:
        """Play every request once to both; return whether the new bundle runs."""
        self._show("starting both bundles")
        with ExitStack() as stack:
            before = stack.enter_context(self._start_old())
            try:
                after = stack.enter_context(_Process(self._new, self._options))
                self._checks += _load_checks(before.begun, after.begun)
                lines = [*self._options.lines, *before.begun["own"]]
                for number, line in enumerate(lines):
                    self._show(f"request {number + 1} of {len(lines)}")
                    self._play_once(number, line, before, after)
                self._note_processes(before, after)
            except _UnusableError as error:
                self._checks.append(ReleaseCheck("loads", "failed", why=str(error)))
                return False
        self._timed = quick_enough(_sample(self._played, self._options.seed))
        self._checks += self._answers.checks(limits)
        return True

    def _play_once(self, number: int, line: Line, before: _Process, after: _Process) -> None:
        old = before.play(line)
        if old.status != 200:  # a log of another bundle, or of a larger one
            return
        new = after.play(line)
        own = number - len(self._options.lines)
        name = str(line["id"]) if own < 0 else f"own {own + 1}"
        found = self._answers.add(name, str(line["path"]), old, new)
        if not found.is_failure:
            self._played.append((old.seconds, line))

    def _start_old(self) -> _Process:
        try:
            return _Process(self._old, self._options)
        except _UnusableError as error:
            raise UsageError(
                f"{self._old}: expected a bundle that runs here, to compare with; {error}",
                hint="give the release that serves now as OLD, and run the gate on a machine of its fleet",
            ) from error

    # ------------------------------------------------------------------ how fast they are

    def _measure(self, limits: ReleaseLimits) -> None:
        """Start pairs of processes, until the intervals are narrow or the time is over."""
        until, least = self._began + self._options.seconds, 2 * self._options.groups - 1
        number = 0
        while number < least or not (self._is_settled(limits) or time.monotonic() > until):
            number += 1
            so_far = self._so_far()
            self._show(f"pair {number} of processes" + (so_far and f": {so_far}"))
            try:
                self._measure_pair(number % 2 == 0, number)
            except _UnusableError as error:
                self._checks.append(ReleaseCheck("goes on", "failed", why=str(error)))
                return

    def _measure_pair(self, with_itself: bool, number: int) -> None:
        times = self._noise if with_itself else self._times
        with ExitStack() as stack:
            paths = [self._old, self._old if with_itself else self._new]
            order = (0, 1) if number % 4 < 2 else (1, 0)
            found = {at: stack.enter_context(_Process(paths[at], self._options)) for at in order}
            pair = (found[0], found[1])
            times.begin_group()
            until = time.monotonic() + _GROUP_SECONDS
            for turn in range(_MOST_ROUNDS):
                if turn >= _LEAST_ROUNDS and time.monotonic() > until:
                    break
                for line in self._timed:
                    self._play_pair(pair, line, times, turn)
            self._note_processes(*pair, with_itself=with_itself)

    def _play_pair(
        self, pair: tuple[_Process, _Process], line: Line, times: PairedTimes, turn: int
    ) -> None:
        order = (0, 1) if turn % 2 else (1, 0)
        answers = {at: pair[at].play(line) for at in order}
        if turn:  # the first round makes programs ready
            times.add(times_of(answers[0]), times_of(answers[1]))

    def _note_processes(
        self, before: _Process, after: _Process, *, with_itself: bool = False
    ) -> None:
        starts = (before.begun["start_seconds"], after.begun["start_seconds"])
        (self._same_starts if with_itself else self._starts).append(starts)
        if not with_itself:
            self._peaks.append((before.peak_bytes(), after.peak_bytes()))

    def _is_settled(self, limits: ReleaseLimits) -> bool:
        share = limits.share("max_slower")
        return all(
            is_settled(side.ratio(name), share)
            for side in (self._times, self._noise)
            for name in self._times.names()
        )

    def _so_far(self) -> str:
        ratios = {name: self._times.ratio(name) for name in self._times.names()}
        return ", ".join(f"{name} {each.described()}" for name, each in ratios.items() if each)

    def _process_checks(self, limits: ReleaseLimits) -> Iterator[ReleaseCheck]:
        """Yield what two starts and two processes take."""
        starts, same = PairedTimes(), PairedTimes()
        for side, pairs in ((starts, self._starts), (same, self._same_starts)):
            for old, new in pairs:
                side.begin_group()
                side.add({"start": old}, {"start": new})
        old, new = (float(np.median(starts.side("start", place))) for place in (0, 1))
        ratio, noise = starts.ratio("start"), same.ratio("start")
        yield slower_check("start", old, new, ratio, noise, limits.share("max_slower_start"))
        if limits.start_ms is not None:
            yield limit_check("start", new, limits.start_ms)
        old, new = (float(np.median([pair[place] for pair in self._peaks])) for place in (0, 1))
        yield growth_check("memory", old, new, limits.share("max_more_memory"), limits.memory_bytes)


def _load_checks(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[ReleaseCheck]:
    """Yield whether the new bundle compiles here, and whether its golden answers are right."""
    counts = [
        sum(each["programs"].get(way, 0) for way in ("compiled", "kept", "compiling"))
        for each in (before, after)
    ]
    shown = [
        f"{each['target']}, {count} compiled"
        for each, count in zip((before, after), counts, strict=True)
    ]
    yield judged("compiled here", counts[1] > counts[0], shown, after["why_not"])
    if after["wrong"]:
        yield ReleaseCheck("golden answers", "failed", why=after["wrong"])


def _sample(played: Sequence[tuple[float, Line]], seed: int) -> list[tuple[float, Line]]:
    """Return all requests, or some of many."""
    if len(played) <= _TIMED:
        return [*played]
    random = np.random.default_rng(seed)
    chosen = random.choice(len(played), _TIMED, replace=False)
    return [played[int(place)] for place in sorted(chosen)]


def requests_of(
    path: str, lines: Iterable[Line], name: str | None
) -> tuple[list[Line], str, int | None]:
    """Return the requests of a log to one model, the model's name, and the limit of new tokens.

    Args:
        path: of the log, for errors.
        lines: the lines of the log.
        name: of the model; None: the only one.

    Raises:
        UsageError: the log has no such model, or several.
    """
    limit: int | None = None
    by_name: dict[str, list[Line]] = {}
    for line in lines:
        if line.get("event") == "start":
            limit = line.get("max_tokens")
        elif can_play(line) and len(models := {call.model for call in calls_of(line)}) == 1:
            by_name.setdefault(models.pop(), []).append(line)
    if name is None and len(by_name) == 1:
        [name] = by_name
    if name is None or name not in by_name:
        found = few(sorted(by_name)) or "no request that gave a result"
        wanted = "requests to one model" if name is None else f"requests to {name!r}"
        raise UsageError(
            f"{path}: expected {wanted}, found {found}",
            hint="name the model: prejit gate NAME=OLD NEW; `prejit serve --log` writes such a log",
        )
    return by_name[name], name, limit


def verdict_line(verdict: GateVerdict) -> str:
    """Return the verdict as one sentence."""
    seconds = f"{len(verdict.checks)} checks in {verdict.seconds:.0f} s"
    if verdict.passed:
        return f"passed: {verdict.new} may take the place of {verdict.old}; {seconds}"
    names = ", ".join(each.name for each in verdict.failed)
    new = verdict.new or "the new bundle"
    return f"failed: {new} may not take the place of {verdict.old}: {names}; {seconds}"


def verdict_table(verdict: GateVerdict) -> str:
    """Return every check as a table for a terminal."""
    rows = [[shortened(cell, _WIDTH) for cell in row] for row in _rows(verdict)]
    return table(_HEAD, rows)


def verdict_json(verdict: GateVerdict) -> dict[str, Any]:
    """Return the verdict as plain data for JSON."""
    return {
        "passed": verdict.passed,
        "old": verdict.old,
        "new": verdict.new,
        "checks": [asdict(each) for each in verdict.checks],
        "limits": described_limits(verdict.limits),
        "requests": verdict.requests,
        "differences": [asdict(each) for each in verdict.differences],
        "seconds": round(verdict.seconds, 3),
    }


def verdict_markdown(verdict: GateVerdict) -> str:
    """Return the verdict as a comment for a pull request."""
    head = "The release passed the gate" if verdict.passed else "The gate stopped the release"
    lines = [f"### {head}", "", _cell(verdict_line(verdict)), ""]
    lines += [f"| {' | '.join(_HEAD)} |", f"|{' --- |' * len(_HEAD)}"]
    lines += [f"| {' | '.join(map(_cell, row))} |" for row in _rows(verdict)]
    if verdict.differences:
        lines += [
            "",
            "<details><summary>Requests that differ</summary>",
            "",
            "| request | path | difference |",
            "| --- | --- | --- |",
            *(
                f"| {_cell(each.id)} | {_cell(each.path)} | {_cell(each.reason)} |"
                for each in verdict.differences[:_MOST_DIFFERENCES]
            ),
            "",
            "</details>",
        ]
    return "\n".join(lines) + "\n"


def verdict_page(verdict: GateVerdict) -> str:
    """Return the verdict as an HTML page, which needs nothing beside itself."""
    import jinja2  # a page is seldom wanted

    source = _TEMPLATE.read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    return environment.from_string(source).render(
        verdict=verdict, line=verdict_line(verdict), limits=described_limits(verdict.limits)
    )


def _rows(verdict: GateVerdict) -> list[tuple[str, ...]]:
    return [(each.name, each.outcome, each.old, each.new, each.why) for each in verdict.checks]


def _cell(text: str) -> str:
    """Return text for a cell of a Markdown table: what it quotes must not end the cell or begin a tag."""
    escaped = printable(text).replace("&", "&amp;").replace("<", "&lt;").replace("`", "&#96;")
    return escaped.replace("|", "\\|").replace("\n", " ")
