"""The files of a build's report beside its bundle: `NAME.report.json`, and `NAME.report.html`, one page."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from prejit.compiler.pipeline.build_interface import Built
from prejit.compiler.pipeline.build_report import (
    BETWEEN,
    COMPILED,
    REPORT_VERSION,
    BuildReport,
    PeakMemory,
    Placed,
    change,
    make_report,
)
from prejit.compiler.progress import Progress
from prejit.runtime.base.wording import size
from prejit.runtime.base.written_files import write_file
from prejit.runtime.cli.inspect_tables import accuracy_table
from prejit.runtime.errors import PrejitError, StoreError
from prejit.runtime.format.blobs import read_whole
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.opening import Contents, match, read_contents
from prejit.runtime.format.root import Root
from prejit.runtime.machine.fingerprint import Fingerprint

_PICTURE_WIDTH, _LABELS_WIDTH, _HEAD_HEIGHT, _LANE_HEIGHT = 1000, 90, 24, 26
_STEPS_WIDTH = _PICTURE_WIDTH - _LABELS_WIDTH - 10
"""Sizes of the picture of steps in pixels: whole, names of lanes, times above, a lane, and the steps."""
_MOST_MARKS = 2000
"""Steps that are drawn, the longest first."""
_MOST_ROWS = 200
"""Rows of a table of programs. The JSON has all of them."""


def report_build(built: Built, progress: Progress, fetched: Mapping[str, str]) -> None:
    """Write the report of a build that has ended.

    Nothing happens if the build changed and compiled nothing and the report of the bundle is there. A report
    that cannot be written is a note: the bundle is what the build is for.
    """
    path = built.path.parent / f"{built.path.name}.report.json"
    if not built.written and not built.compiled and _is_of(path, built.digest):
        return
    try:
        _write(built, progress, fetched, path)
    except PrejitError as error:
        progress.note(f"no report was written: {error}")


def _write(built: Built, progress: Progress, fetched: Mapping[str, str], path: Path) -> None:
    def read(layout: Layout, root: Root) -> tuple[str, list[Contents]]:
        targets = sorted(match(root, Fingerprint.current()), key=lambda target: target.name)
        return root.digest, [read_contents(layout, target) for target in targets]

    digest, contents = read_whole(built.path, read)
    if digest != built.digest:
        return  # another build has replaced the bundle just now, and writes its own report
    report = make_report(
        built,
        contents,
        progress.steps,
        seconds=progress.seconds,
        date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        fetched=fetched,
        peak_memory=PeakMemory(
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
        ),
    )
    if (last := _last(path)) is not None and last.get("digest") != digest:
        try:
            report = replace(report, change=change(last, asdict(report)))
        except (KeyError, TypeError):  # another version wrote it
            progress.note(f"{path}: expected a report of this version of prejit, found another")
    content = json.dumps(asdict(report), separators=(",", ":"), default=list)
    write_file(path.with_suffix(".html"), report_page(report).encode("utf-8", "backslashreplace"))
    write_file(path, content.encode() + b"\n")


def _is_of(path: Path, digest: str) -> bool:
    """Return whether a file is the report of a bundle. Only its first values are read."""
    begins = f'{{"report":{REPORT_VERSION},"digest":"{digest}"'.encode()
    try:
        with path.open("rb") as file:
            return file.read(len(begins)) == begins and path.with_suffix(".html").exists()
    except OSError:
        return False


def _last(path: Path) -> dict[str, Any] | None:
    """Return the last report; None: there is none that can be read."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(f"{path}: cannot read: {error.strerror}") from error
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


@dataclass(frozen=True, slots=True)
class StepMark:
    """A step in the picture: its place, its class in the style sheet, and what shows under the pointer."""

    x: float
    width: float
    y: int
    kind: str
    text: str


def report_page(report: BuildReport) -> str:
    """Return the page of a report as HTML."""
    from prejit.compiler.pages import (
        render,
    )  # imports jinja2, which a build that changes nothing does without

    lanes = sorted({step.lane for step in report.steps}, key=_lane_order)
    path: dict[str, float] = {}
    for link in report.critical_path:
        kind = _kind_of(link.what)
        path[kind] = path.get(kind, 0.0) + link.end - link.start
    programs = sorted(report.programs, key=lambda each: -each.compile_seconds)
    return render(
        "build.html",
        report=report,
        lanes=[(name, _middle(place)) for place, name in enumerate(lanes)],
        marks=_marks(report, lanes),
        ticks=_ticks(report.seconds),
        height=_HEAD_HEIGHT + _LANE_HEIGHT * len(lanes) + 6,
        width=_PICTURE_WIDTH,
        labels=_LABELS_WIDTH,
        head=_HEAD_HEIGHT,
        path_kinds=sorted(path.items(), key=lambda item: -item[1]),
        programs=programs[:_MOST_ROWS],
        left_out=max(0, len(programs) - _MOST_ROWS),
        not_drawn=max(0, len(report.steps) - _MOST_MARKS),
        compiled=report.origins.get(COMPILED, 0),
        layers=[(name.removeprefix("application/vnd."), n) for name, n in report.layers.items()],
        accuracy=None if report.accuracy is None else accuracy_table(report.accuracy),
        change_rows=_change_rows(report),
        between=BETWEEN,
        size=size,
        growth=_growth,
    )


def _lane_order(name: str) -> tuple[bool, int]:
    kind, _, number = name.partition(" ")
    return kind != "build", int(number or 1)


def _middle(place: int) -> int:
    return _HEAD_HEIGHT + _LANE_HEIGHT * place + _LANE_HEIGHT // 2


def _kind_of(what: str) -> str:
    """Return what steps of a kind have in common: the first word, as in `compiling`."""
    return BETWEEN if what == BETWEEN else what.partition(" ")[0]


def _marks(report: BuildReport, lanes: Sequence[str]) -> list[StepMark]:
    """Return the steps as they are drawn, those of the critical path in another colour."""
    scale = _STEPS_WIDTH / report.seconds if report.seconds else 0.0
    on_path = {(link.what, link.start) for link in report.critical_path}
    places = {name: _middle(place) for place, name in enumerate(lanes)}
    longest: list[Placed] = sorted(report.steps, key=lambda step: step.start - step.end)
    return [
        StepMark(
            _LABELS_WIDTH + step.start * scale,
            max(1.0, (step.end - step.start) * scale),
            places[step.lane],
            "path" if (step.what, step.start) in on_path else "step",
            f"{step.what}: {step.end - step.start:.2f} s, from {step.start:.2f} s",
        )
        for step in sorted(longest[:_MOST_MARKS], key=lambda step: step.start)
    ]


def _ticks(seconds: float) -> list[tuple[float, str]]:
    """Return about eight places and labels of the axis of time."""
    if seconds <= 0:
        return []
    power = 10.0 ** len(str(int(seconds / 8))) / 10 if seconds >= 8 else 0.01
    steps = [power * factor for factor in (1, 2, 5, 10, 20, 50, 100, 200)]
    step = next((one for one in steps if seconds / one <= 8), steps[-1])
    return [
        (_LABELS_WIDTH + _STEPS_WIDTH * number * step / seconds, f"{number * step:g} s")
        for number in range(int(seconds / step) + 1)
    ]


def _change_rows(report: BuildReport) -> list[tuple[str, Sequence[str]]]:
    """Return the groups of programs that differ from the last release."""
    if (found := report.change) is None:
        return []
    groups = (
        ("added", found.added),
        ("removed", found.removed),
        ("StableHLO changed", found.changed),
        ("same StableHLO, another executable", found.recompiled),
        ("versions", [f"{name} {versions}" for name, versions in found.versions.items()]),
        ("weights", ["changed"] if found.weights else []),
    )
    return [(name, rows) for name, rows in groups if rows]


def _growth(count: int) -> str:
    return f"{'-' if count < 0 else '+'}{size(abs(count))}"
