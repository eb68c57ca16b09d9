"""The report of a run: what jax found in the bundle, what it compiled and why, at its end or meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from prejit.runtime.base.wording import table
from prejit.runtime.format.bundle_schema import RecordedProgram
from prejit.runtime.machine.fingerprint import Fingerprint, Requirement
from prejit.runtime.recorded.hook import jax_texts
from prejit.runtime.recorded.recorded_bundle import RecordedBundle
from prejit.runtime.recorded.watched_command import (
    HIT,
    REFUSED,
    UNCACHED,
    UNTRACED,
    JaxRequest,
    StartParts,
    WatchedProcess,
    read_events,
)

_PAUSE_SECONDS = 0.5
"""How often a running program's misses are looked for."""
_RECORD = "record this run too (prejit record -o BUNDLE -- COMMAND)"
_UNKNOWN = "not known"
_CONDITIONS = {
    # ingredient: (the conditions behind it, what to do)
    jax_texts.BACKEND: (
        ("backend version",),
        f"run with the plugin and driver of the recording, or {_RECORD}",
    ),
    jax_texts.XLA_FLAGS: (
        ("XLA flags",),
        "set XLA_FLAGS, LIBTPU_INIT_ARGS and arguments that begin with --xla as in the recording, or "
        + _RECORD,
    ),
    jax_texts.COMPILE_OPTIONS: (
        ("device count",),
        "use as many devices, and the same compiler options of jit and settings of jax, or "
        + _RECORD,
    ),
    jax_texts.ACCELERATOR: (
        ("device kind", "device count"),
        f"use as many devices of this kind, or {_RECORD}: it adds what this machine needs",
    ),
}


@dataclass(frozen=True, slots=True)
class Miss:
    """A program that was compiled although the bundle was there.

    Attributes:
        name: jax's name of the program.
        arguments: its arguments; None: not known.
        where: the line of the program that asked for it.
        seconds: the time that compiling it took.
        refused: whether `--require-aot` ended it.
        differs: why it was no hit.
    """

    name: str
    arguments: tuple[str, ...] | None
    where: str
    seconds: float
    refused: bool
    differs: tuple[Difference, ...]


@dataclass(frozen=True, slots=True)
class Used:
    """The outcome of the programs of one name.

    Attributes:
        name: jax's name of the programs.
        hits: how often one was read from the bundle.
        hit_seconds: the time for that.
        saved_seconds: the time that compiling them took in the recording, in whole seconds for each, without
            the time of reading; as jax reports it.
        misses: how often one was compiled.
        miss_seconds: the time for that.
        untraced: how many calls ran without a trace.
        untraced_seconds: the time that comparing and loading took for them.
    """

    name: str
    hits: int
    hit_seconds: float
    saved_seconds: float
    misses: int
    miss_seconds: float
    untraced: int
    untraced_seconds: float


@dataclass(frozen=True, slots=True)
class RunReport:
    """The report of one run of a command.

    Attributes:
        bundle, digest: name and digest of the bundle.
        target: the target that was served, or the closest.
        mismatch: why no target matches; None: one does.
        processes: number of processes that used jax.
        programs: what became of the programs, by name.
        misses: the programs that were compiled.
        traced: names of the programs whose calls were traced although the bundle has calls, by the reason.
        start: where the time of the process with the most programs went; None: there is none.
        unwatched: number of processes in which the hook failed: they may have compiled more.
        notes: what else keeps jax from the bundle.
    """

    bundle: str
    digest: str
    target: str
    mismatch: str | None
    processes: int
    programs: tuple[Used, ...]
    misses: tuple[Miss, ...]
    traced: dict[str, tuple[str, ...]]
    start: StartParts | None
    unwatched: int
    notes: tuple[str, ...]

    @property
    def hits(self) -> int:
        """Return how often a program was read from the bundle."""
        return sum(each.hits for each in self.programs)

    @property
    def untraced(self) -> int:
        """Return how many calls ran without a trace."""
        return sum(each.untraced for each in self.programs)

    def described(self) -> dict[str, Any]:
        """Return the report for JSON."""
        return {
            "hits": self.hits,
            "missed": len(self.misses),
            "untraced": self.untraced,
            **asdict(self),
        }


def report_of(
    bundle: RecordedBundle, processes: Sequence[WatchedProcess], machine: Fingerprint
) -> RunReport:
    """Return the report of a run."""
    misses = tuple(
        Miss(
            found.name,
            found.arguments,
            found.where,
            found.seconds,
            found.outcome == REFUSED,
            differences(
                found,
                bundle.programs,
                bundle.requirement,
                jaxlib=process.versions["jaxlib"],
                cpu_features=machine.cpu_features,
            ),
        )
        for process in processes
        for found in process.requests
        if found.outcome not in (HIT, UNTRACED)
    )
    return RunReport(
        bundle.name,
        bundle.digest,
        bundle.verdict.target,
        None if bundle.verdict.matches else bundle.verdict.reason(),
        len(processes),
        _used(processes),
        misses,
        _traced(processes),
        max(processes, key=lambda each: len(each.requests)).start if processes else None,
        sum(process.failure is not None for process in processes),
        tuple(_notes(bundle, processes, machine)),
    )


def _used(processes: Sequence[WatchedProcess]) -> tuple[Used, ...]:
    requests = [request for process in processes for request in process.requests]
    found = []
    for name in dict.fromkeys(request.name for request in requests):
        own = [each for each in requests if each.name == name]
        hits = [each for each in own if each.outcome == HIT]
        untraced = [each for each in own if each.outcome == UNTRACED]
        misses = [each for each in own if each.outcome not in (HIT, UNTRACED)]
        used = Used(
            name,
            len(hits),
            sum(each.seconds for each in hits),
            sum(max(0.0, each.saved_seconds or 0.0) for each in hits),
            len(misses),
            sum(each.seconds for each in misses),
            len(untraced),
            sum(each.seconds for each in untraced),
        )
        found.append(used)
    return tuple(found)


def _traced(processes: Sequence[WatchedProcess]) -> dict[str, tuple[str, ...]]:
    found: dict[str, dict[str, None]] = {}
    for process in processes:
        for request in process.requests:
            if request.traced is not None:
                found.setdefault(request.traced, {})[request.name] = None
    return {reason: tuple(names) for reason, names in found.items()}


def _notes(
    bundle: RecordedBundle, processes: Sequence[WatchedProcess], machine: Fingerprint
) -> list[str]:
    notes = []
    outcomes = [request.outcome for process in processes for request in process.requests]
    if bundle.directory is None and HIT in outcomes:
        notes.append("the hits are of the program's own cache")
    if not processes:
        notes.append(
            "no process reported: the command used no jax, or started Python with -I, -E or -S, or with "
            "another environment"
        )
    for failure in dict.fromkeys(each.failure for each in processes):
        if failure is not None:
            notes.append(f"a process could not be watched: {failure}")
    jaxlibs = sorted({process.versions["jaxlib"] for process in processes} - {machine.jaxlib})
    if jaxlibs:
        notes.append(
            f"the program runs jaxlib {', '.join(jaxlibs)} and prejit {machine.jaxlib}: install prejit "
            "beside the program, so that it chooses the right target"
        )
    for directory in dict.fromkeys(each.found_directory for each in processes):
        if directory is not None:
            notes.append(f"the program set jax_compilation_cache_dir to {directory}: not used")
    return notes


def text(report: RunReport) -> str:
    """Return a report as text for a terminal."""
    compiled = sum(miss.seconds for miss in report.misses)
    read = sum(each.hit_seconds for each in report.programs)
    saved = sum(each.saved_seconds for each in report.programs)
    has_calls = bool(report.untraced or report.traced)
    parts = [
        f"{report.bundle} for {report.target}, {report.digest[:19]}: "
        + (f"{_counted(report.untraced, 'call')} untraced, " if has_calls else "")
        + f"{_counted(report.hits, 'hit')} in {read:.2f} s, "
        f"{_counted(len(report.misses), 'miss')} in {compiled:.2f} s; {_counted(report.processes, 'process')}"
        + (f"; compiling took {saved:.0f} s more when it was recorded" if saved >= 1 else "")
    ]
    if report.mismatch is not None:
        parts.append(f"nothing of the bundle was used: {report.mismatch}")
    parts += [f"note: {note}" for note in report.notes]
    if report.programs:
        rows = [
            (
                each.name,
                *([str(each.untraced)] if has_calls else []),
                str(each.hits),
                str(each.misses),
                f"{(each.hit_seconds + each.miss_seconds + each.untraced_seconds) * 1e3:.0f} ms",
            )
            for each in report.programs
        ]
        untraced = ["untraced"] if has_calls else []
        parts.append(table(["program", *untraced, "hits", "misses", "took"], rows))
    if report.start is not None:
        parts.append(_start_line(report.start))
    parts += explained(report.misses)
    for reason, names in report.traced.items():
        some = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        parts.append(f"traced: {some}\n  {reason}")
    return "\n\n".join(parts)


def _start_line(start: StartParts) -> str:
    named = {
        "imports": start.imports_seconds,
        "Python and data before the first program": start.before_seconds,
        "comparing inputs and loading": start.comparing_seconds,
        "tracing and lowering": start.tracing_seconds,
        "compiling or reading": start.compiling_seconds,
        "running and the rest": start.rest_seconds,
    }
    shown = ", ".join(
        f"{name} {seconds:.2f}" for name, seconds in named.items() if seconds >= 0.005
    )
    return f"{start.total_seconds:.2f} s from the start of the process to its last program: {shown}"


def _counted(count: int, name: str) -> str:
    """Return `1 miss` or `2 misses`."""
    ending = "" if count == 1 else "es" if name.endswith("s") else "s"
    return f"{count} {name}{ending}"


def explained(misses: Sequence[Miss]) -> list[str]:
    """Return a paragraph for each miss; equal ones share it."""
    groups: dict[tuple[object, ...], list[Miss]] = {}
    for miss in misses:
        groups.setdefault((miss.name, miss.arguments, miss.differs), []).append(miss)
    paragraphs = []
    for (name, *_), group in groups.items():
        places = ", ".join(dict.fromkeys(each.where for each in group))
        lines = [f"miss: {name} at {places}" + (f", {len(group)} times" if len(group) > 1 else "")]
        lines += [f"  {each}" for each in group[0].differs]
        lines += [
            f"  hint: {hint}" for hint in dict.fromkeys(each.hint for each in group[0].differs)
        ]
        paragraphs.append("\n".join(lines))
    return paragraphs


@contextmanager
def telling(
    directory: Path, bundle: RecordedBundle, machine: Fingerprint, tell: Callable[[str], None]
) -> Iterator[None]:
    """Explain each miss soon after it happened, as the report at the end does, while the block runs.

    `directory` is where the processes of the program write their events. `tell` takes a paragraph for each
    miss, in a thread of its own.
    """
    explained_misses: set[Miss] = set()
    known = 0
    over = threading.Event()

    def tell_new() -> None:
        nonlocal known
        size = sum(path.stat().st_size for path in directory.glob("*.jsonl"))
        if size == known:
            return
        known = size
        misses = report_of(bundle, read_events(directory), machine).misses
        for paragraph in explained([miss for miss in misses if miss not in explained_misses]):
            tell(paragraph)
        explained_misses.update(misses)

    def follow() -> None:
        while not over.wait(_PAUSE_SECONDS):
            tell_new()

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        tell_new()


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that differs between a program and the nearest recorded one.

    Attributes:
        name: what it is: jax's name of the ingredient, `arguments`, or another.
        recorded: its value in the bundle.
        found: its value in this run.
        hint: what to do.
    """

    name: str
    recorded: str
    found: str
    hint: str

    def __str__(self) -> str:
        return f"{self.name}: recorded {self.recorded}, found {self.found}"


def differences(
    found: JaxRequest,
    recorded: Sequence[RecordedProgram],
    requirement: Requirement,
    *,
    jaxlib: str,
    cpu_features: Sequence[str],
) -> tuple[Difference, ...]:
    """Return what differs between a program that was compiled and the nearest recorded one.

    `recorded` and `requirement` are those of the target that matches, or of the closest; `jaxlib` is the
    version in the program's process.
    """
    if found.outcome == UNCACHED:
        what = "jax_enable_compilation_cache"
        hint = "remove what turns jax's cache off; jax also keeps no program of some platforms"
        return (Difference("jax's cache", "on", "off", f"{hint} ({what})"),)
    same_name = [each for each in recorded if each.name == found.name]
    if not same_name:
        return (Difference("program", "none of this name", _arguments(found.arguments), _RECORD),)
    if not found.ingredients:
        hint = "leave the loggers of jax enabled: logging.disable and disable_existing_loggers hide the cause"
        return (Difference("cause", f"{len(same_name)} of this name", _UNKNOWN, hint),)
    nearest = min(same_name, key=lambda each: _distance(found, each))
    rows = [
        _difference(name, found, nearest, requirement, jaxlib, cpu_features)
        for name in _telling(_differing(found, nearest))
    ]
    if rows:
        return tuple(rows)
    hint = "look for warnings of jax in the program's output: it could not load the recorded file"
    return (Difference("file", nearest.file, "not loaded", hint),)


def _differing(found: JaxRequest, recorded: RecordedProgram) -> list[str]:
    """Return the names of the ingredients that differ, in jax's order."""
    names = dict.fromkeys((*jax_texts.INGREDIENTS, *found.ingredients))
    return [
        name
        for name in names
        if name in recorded.ingredients
        and found.ingredients.get(name) != recorded.ingredients[name]
    ]


def _telling(differing: list[str]) -> list[str]:
    """Return the ingredients that differ without those that follow from others.

    Another jaxlib writes most of the others in other forms. XLA's flags are also in the compile options.
    """
    if jax_texts.JAXLIB in differing:
        return [jax_texts.JAXLIB]
    if jax_texts.XLA_FLAGS in differing:
        return [name for name in differing if name != jax_texts.COMPILE_OPTIONS]
    return differing


def _distance(found: JaxRequest, recorded: RecordedProgram) -> tuple[int, bool, str]:
    """Return a sort key: few ingredients that differ, equal arguments, the file's name."""
    differing = _differing(found, recorded)
    return len(differing), found.arguments != recorded.arguments, recorded.file


def _difference(
    name: str,
    found: JaxRequest,
    recorded: RecordedProgram,
    requirement: Requirement,
    jaxlib: str,
    cpu_features: Sequence[str],
) -> Difference:
    if name == jax_texts.COMPUTATION:
        if found.arguments != recorded.arguments:
            sides = _arguments(recorded.arguments), _arguments(found.arguments)
            return Difference("arguments", *sides, _RECORD)
        hint = (
            "a static argument, or a shape that it takes from outside, has another value, as n in "
            f"jnp.zeros(n); or its code or a library changed: {_RECORD}"
        )
        return Difference(name, "another program of these arguments", "this one", hint)
    if name == jax_texts.JAXLIB:
        hint = f"install jaxlib {requirement.jaxlib}, or {_RECORD}"
        return Difference("jaxlib", requirement.jaxlib, jaxlib, hint)
    if name == jax_texts.COMPRESSION:
        hint = "install zstandard in both environments or in none"
        return Difference(name, "another compression", "this one", hint)
    conditions, hint = _CONDITIONS.get(name, ((), _RECORD))
    for condition in conditions:
        there = recorded.conditions.get(condition, _UNKNOWN) or "none"
        here = found.conditions.get(condition, _UNKNOWN) or "none"
        if there != here:
            return Difference(condition, there, here, hint)
    if name == jax_texts.ACCELERATOR and set(cpu_features) != set(requirement.cpu_features):
        more = set(requirement.cpu_features) - set(cpu_features)
        fewer = set(cpu_features) - set(requirement.cpu_features)
        return Difference("CPU features", _only(more), _only(fewer), hint)
    return Difference(name, "another one", "this one", hint)


def _arguments(arguments: Sequence[str] | None) -> str:
    if arguments is None:
        return _UNKNOWN
    more = f", ... {len(arguments)} in all" if len(arguments) > 6 else ""
    return f"({', '.join(arguments[:6])}{more})"


def _only(names: set[str]) -> str:
    return f"also {', '.join(sorted(names))}" if names else "no others"
