"""The report of a build as a value, with its time line and critical path. No files are read here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from prejit.compiler.pipeline.build_interface import Built
from prejit.compiler.pipeline.pack.weights_layer import FewBits
from prejit.compiler.progress import Step
from prejit.runtime.format.bundle_schema import Accuracy
from prejit.runtime.format.names import WEIGHTS_MEDIA_TYPE
from prejit.runtime.format.opening import Contents

REPORT_VERSION = 1
"""The version of the fields of a report. It is the first value of the file."""

COMPILED, EQUAL, LOCAL = "compiled", "equal to another program", "this machine"
"""Where an executable came from, beside the names of shared stores."""


BETWEEN = "other work"
"""The text of a critical path where no step ran: imports, plans, reading and checking files."""

INSTANT = 0.005
"""Steps of fewer seconds are left out, and so are gaps in a critical path: waits for nothing, for example."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A step in its lane.

    Attributes:
        lane: `worker 1` for compiling, `build` for other work; `build 2` if other work ran beside it.
        what: the step.
        start, end: seconds since the build began.
    """

    lane: str
    what: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Link:
    """A part of the critical path: a step, or the time between two.

    Attributes:
        what: the step, or BETWEEN.
        start, end: seconds since the build began.
    """

    what: str
    start: float
    end: float


def place(steps: Iterable[Step]) -> tuple[Placed, ...]:
    """Return steps in lanes, so that no two of a lane overlap. A lane of compiling is one worker's work."""
    found: list[Placed] = []
    free: dict[str, list[float]] = {"worker": [], "build": []}
    for step in sorted(steps, key=lambda step: (step.start, -step.end)):
        if step.end - step.start < INSTANT:
            continue
        kind = "worker" if step.program else "build"
        ends = free[kind]
        number = next((n for n, end in enumerate(ends) if end <= step.start), len(ends))
        ends[number : number + 1] = [step.end]
        lane = f"worker {number + 1}" if step.program else "build" + f" {number + 1}" * bool(number)
        found.append(Placed(lane, step.what, step.start, step.end))
    return tuple(found)


def critical_path(steps: Sequence[Step], seconds: float) -> tuple[Link, ...]:
    """Return the chain of steps that bounded a build, first to last, with the gaps between them.

    A build does not write down what waited for what. So this goes back from the end: before each step comes
    the one that ended last when it began, because the end of that one is what let it begin.
    """
    left = sorted((s for s in steps if s.end - s.start >= INSTANT), key=lambda step: step.end)
    found: list[Link] = []
    at = seconds
    while at > INSTANT:
        while left and left[-1].end > at:
            left.pop()
        before = left.pop() if left else None
        since = 0.0 if before is None else before.end
        if at - since >= INSTANT:
            found.append(Link(BETWEEN, since, at))
        if before is None:
            break
        found.append(Link(before.what, before.start, before.end))
        at = before.start
    return tuple(reversed(found))


_Timed = TypeVar("_Timed", Placed, Link)


@dataclass(frozen=True, slots=True)
class ReportedProgram:
    """A program for a target.

    Attributes:
        program, kind, bucket: as in the program table.
        target: name of the target.
        origin: COMPILED, EQUAL, LOCAL, or the name of the shared store that it came from.
        compile_seconds: time that the compiler took, in this build or an earlier one.
        executable_bytes, portable_bytes: sizes in the bundle.
        temp_bytes, need_bytes: memory while it runs: for intermediate values, and in total.
        executable, portable: digests of the decompressed executable and StableHLO.
    """

    program: str
    kind: str
    bucket: dict[str, int]
    target: str
    origin: str
    compile_seconds: float
    executable_bytes: int
    portable_bytes: int
    temp_bytes: int
    need_bytes: int
    executable: str
    portable: str


@dataclass(frozen=True, slots=True)
class BucketCost:
    """The cost of a size of one axis, and what it saves.

    Attributes:
        axis: `batch`, `prompt`, `context`, `length`, or a variable of a function.
        size: the size.
        programs: number of programs x targets that have it.
        compile_seconds: of those programs.
        executable_bytes: of those programs.
        next: the next larger size, which a request would take without this one; None: there is none.
        saved: the share of that larger size that this one does not compute; None: there is none.
    """

    axis: str
    size: int
    programs: int
    compile_seconds: float
    executable_bytes: int
    next: int | None = None
    saved: float | None = None


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """The most memory of a process, in bytes.

    Attributes:
        build: the build's own process.
        workers: the largest process that it started and that has ended: a worker, or a compiler of kernels.
    """

    build: int
    workers: int


@dataclass(frozen=True, slots=True)
class Change:
    """The difference of a bundle to the one that it replaced.

    Attributes:
        digest: the digest of the bundle that was replaced.
        date: when that one was built.
        added, removed: programs, each as `NAME for TARGET`.
        changed: programs whose StableHLO differs.
        recompiled: programs with the same StableHLO and another executable.
        executable_bytes: growth of all executables; negative: they shrank.
        weights: whether the weights differ.
        versions: for each package whose version differs, `before -> after`.
    """

    digest: str
    date: str
    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[str, ...]
    recompiled: tuple[str, ...]
    executable_bytes: int
    weights: bool
    versions: dict[str, str]


@dataclass(frozen=True, slots=True)
class BuildReport:
    """The report of a build.

    Attributes:
        report: REPORT_VERSION.
        digest: digest of the bundle.
        bundle: name of the bundle.
        date: when the build ended, ISO 8601, UTC.
        written: whether the bundle was changed.
        seconds: length of the build by the clock.
        compile_seconds: sum over the programs that were compiled now.
        origins: number of programs x targets by origin.
        versions: versions of packages; those of a target's own environment have its name before them.
        programs: every program for every target.
        steps: the time line.
        critical_path: the chain of steps that bounded the build.
        peak_memory: of the build and its workers.
        layers: size of each layer by media type, each layer counted once.
        weights: digests of the layers of weights.
        buckets: what each size costs and buys.
        forms: number of products by form and target, such as `kernel`.
        accuracy: what the dtypes cost; None: all are float32.
        change: difference to the bundle of the last report beside it; None: there was none.
        few_bits: what became of matrices that were published in few bits; None: there are none.
        int4: what decided how matrices were rounded to int4; empty: there are none.
    """

    report: int
    digest: str
    bundle: str
    date: str
    written: bool
    seconds: float
    compile_seconds: float
    origins: dict[str, int]
    versions: dict[str, str]
    programs: tuple[ReportedProgram, ...]
    steps: tuple[Placed, ...]
    critical_path: tuple[Link, ...]
    peak_memory: PeakMemory
    layers: dict[str, int]
    weights: tuple[str, ...]
    buckets: tuple[BucketCost, ...]
    forms: dict[str, dict[str, int]]
    accuracy: Accuracy | None = None
    change: Change | None = None
    few_bits: FewBits | None = None
    int4: str = ""


def make_report(
    built: Built,
    contents: Sequence[Contents],
    steps: Sequence[Step],
    *,
    seconds: float,
    date: str,
    fetched: Mapping[str, str],
    peak_memory: PeakMemory,
) -> BuildReport:
    """Return the report of a build, without its difference to the last one.

    `contents` are of all targets; `fetched` has the shared store that a result came from, by its key's
    digest.
    """
    compiled = {each.key for each in built.programs if each.new}
    known = {(each.program, each.target): each for each in built.programs}
    programs = []
    for content in contents:
        target = content.config.target
        for entry in content.config.programs:
            of = known.get((entry.name, target))
            origin = LOCAL if of is None else fetched.get(of.key, LOCAL)
            if of is not None and of.key in compiled:
                origin = COMPILED if of.new else EQUAL
            programs.append(
                ReportedProgram(
                    entry.name,
                    entry.kind,
                    dict(entry.bucket),
                    target,
                    origin,
                    0.0 if of is None else of.compile_milliseconds / 1000,
                    entry.executable.size,
                    entry.portable.size,
                    entry.memory.temp_bytes,
                    entry.memory.need_bytes,
                    entry.executable.raw_digest,
                    entry.portable.raw_digest,
                )
            )
    layers = {layer.digest: layer for each in contents for layer in each.manifest.layers}
    sizes: Counter[str] = Counter()
    for layer in layers.values():
        sizes[layer.mediaType] += layer.size
    return BuildReport(
        REPORT_VERSION,
        built.digest,
        contents[0].config.bundle,
        date,
        built.written,
        round(seconds, 3),
        round(sum(each.compile_seconds for each in programs if each.origin == COMPILED), 3),
        dict(Counter(each.origin for each in programs)),
        _versions(contents),
        tuple(programs),
        tuple(map(_rounded, place(steps))),
        tuple(map(_rounded, critical_path(steps, seconds))),
        peak_memory,
        dict(sorted(sizes.items())),
        tuple(sorted(d for d, layer in layers.items() if layer.mediaType == WEIGHTS_MEDIA_TYPE)),
        bucket_costs(programs),
        {
            each.config.target: dict(Counter(form.form for form in each.config.forms))
            for each in contents
            if each.config.forms
        },
        built.accuracy,
        few_bits=built.few_bits,
        int4=built.int4,
    )


def bucket_costs(programs: Sequence[ReportedProgram]) -> tuple[BucketCost, ...]:
    """Return what each size of each axis costs and buys.

    A program counts for each of its axes: the sums of two axes are of the same programs.
    """
    found: dict[tuple[str, int], list[ReportedProgram]] = {}
    for program in programs:
        for axis, size in program.bucket.items():
            # Where a copy comes from, which is no axis of its own.
            if not axis.startswith("source_"):
                found.setdefault((axis, size), []).append(program)
    costs = []
    for axis in dict.fromkeys(axis for axis, _ in found):
        sizes = sorted(size for of, size in found if of == axis)
        for size, larger in zip(sizes, [*sizes[1:], None], strict=True):
            those = found[axis, size]
            costs.append(
                BucketCost(
                    axis,
                    size,
                    len(those),
                    round(sum(each.compile_seconds for each in those), 3),
                    sum(each.executable_bytes for each in those),
                    larger,
                    None if larger is None else round(1 - size / larger, 4),
                )
            )
    return tuple(costs)


def _versions(contents: Sequence[Contents]) -> dict[str, str]:
    """Return the versions that all targets share, and those of a target alone with its name."""
    first = contents[0].config.versions
    found = dict(first)
    for each in contents[1:]:
        for name, version in each.config.versions.items():
            if first.get(name) != version:
                found[f"{each.config.target}: {name}"] = version
    return dict(sorted(found.items()))


def _rounded(step: _Timed) -> _Timed:
    return replace(step, start=round(step.start, 4), end=round(step.end, 4))


def change(before: Mapping[str, Any], after: Mapping[str, Any]) -> Change:
    """Return the difference of two reports, as their JSON has them.

    Raises:
        KeyError, TypeError: `before` is no report.
    """
    old, new = _programs(before["programs"]), _programs(after["programs"])
    both = [name for name in new if name in old]
    changed = [name for name in both if old[name]["portable"] != new[name]["portable"]]
    recompiled = [name for name in both if old[name]["executable"] != new[name]["executable"]]
    sums = [sum(one["executable_bytes"] for one in each.values()) for each in (old, new)]
    was, now = before["versions"], after["versions"]
    return Change(
        before["digest"],
        before["date"],
        tuple(name for name in new if name not in old),
        tuple(name for name in old if name not in new),
        tuple(changed),
        tuple(name for name in recompiled if name not in changed),
        sums[1] - sums[0],
        before["weights"] != after["weights"],
        {
            name: f"{was.get(name, 'none')} -> {now.get(name, 'none')}"
            for name in sorted({*was, *now})
            if was.get(name) != now.get(name)
        },
    )


def _programs(rows: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    return {f"{row['program']} for {row['target']}": row for row in rows}
