"""Draw where a start spends its time, from exec to the first token, as a picture and a table.

    python -m benchmarks.studies.startup_profile BUNDLE -o PREFIX [--runs 15] [--title TEXT]

Runs startup_child.py in fresh processes and draws the one with the median time. Writes PREFIX.svg, PREFIX.md
and PREFIX.json: every part by thread, on a clock that starts just before exec.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from benchmarks.harness.measure import environment

HERE = Path(__file__).resolve().parent
KINDS = {
    "python": "#8c959f",
    "import prejit": "#1a7f37",
    "import standard library": "#6e7781",
    "import numpy": "#0969da",
    "import jaxlib": "#8250df",
    "import jax": "#bf3989",
    "import others": "#57606a",
    "bundle": "#9a6700",
    "weights": "#bc4c00",
    "first array": "#1b7c83",
    "programs": "#cf222e",
    "tokenizer": "#4d2d00",
    "run": "#116329",
    "other": "#afb8c1",
}
"""Colour of each kind of work, in the order of the table."""
MAIN = "MainThread"
_WIDTH, _LEFT, _ROW, _DEEPEST = 1000, 12, 20, 6


@dataclass(frozen=True)
class Span:
    """A timed part of a start.

    Attributes:
        kind: one of KINDS.
        name: name of the module or function.
        thread: thread that did the work.
        start, end: milliseconds since exec.
        depth: number of parts of the same thread that contain it.
    """

    kind: str
    name: str
    thread: str
    start: float
    end: float
    depth: int


@dataclass(frozen=True)
class Start:
    """The spans of one fresh process.

    Attributes:
        spans: parts of the start.
        first: milliseconds from exec to the first token.
        modules: number of modules that were imported by then.
    """

    spans: tuple[Span, ...]
    first: float
    modules: int


def measured(bundle: str) -> Start:
    """Run one process.

    Raises:
        SystemExit: the process failed.
    """
    began = time.perf_counter_ns()
    done = subprocess.run(
        [sys.executable, str(HERE / "startup_child.py"), bundle],
        capture_output=True,
        text=True,
        env=environment({}),
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    facts = json.loads(done.stdout.splitlines()[-1].removeprefix("LAST "))

    def since(nanoseconds: int) -> float:
        return (nanoseconds - began) / 1e6

    found = [
        (kind, name, thread, since(a), since(b)) for kind, name, thread, a, b in facts["spans"]
    ]
    found.append(("python", "interpreter and site", MAIN, 0.0, since(facts["begun"])))
    found.append(
        ("other", "this benchmark's Python", MAIN, since(facts["begun"]), since(facts["ended"]))
    )
    first = since(facts["ended"])
    return Start(tuple(_nested([one for one in found if one[3] < first])), first, facts["modules"])


def _nested(found: list[tuple[str, str, str, float, float]]) -> list[Span]:
    spans: list[Span] = []
    open_until: dict[str, list[float]] = {}
    for kind, name, thread, start, end in sorted(found, key=lambda one: (one[3], -one[4])):
        around = open_until.setdefault(thread, [])
        while around and around[-1] <= start:
            around.pop()
        spans.append(Span(kind, name, thread, start, end, len(around)))
        around.append(end)
    return spans


def own_time(start: Start) -> dict[str, dict[str, float]]:
    """Return the milliseconds of each kind by thread, without nested parts."""
    totals: dict[str, dict[str, float]] = {}
    around: dict[str, list[Span]] = {}
    for span in start.spans:
        stack = around.setdefault(span.thread, [])
        del stack[span.depth :]
        own = totals.setdefault(span.thread, dict.fromkeys(KINDS, 0.0))
        length = min(span.end, start.first) - span.start
        own[span.kind] += length
        if stack:
            own[stack[-1].kind] -= length
        stack.append(span)
    return totals


def picture(start: Start, title: str) -> str:
    """Draw parts as bars: a band for each thread, nested parts below their parents."""
    scale = (_WIDTH - 2 * _LEFT) / start.first
    parts: list[str] = []
    top = 58
    threads = list(dict.fromkeys(span.thread for span in start.spans))
    for thread in threads:
        spans = [s for s in start.spans if s.thread == thread and s.depth < _DEEPEST]
        wide = [span for span in spans if (span.end - span.start) * scale >= 1]
        if not wide:
            continue
        parts.append(f'<text x="{_LEFT}" y="{top}" class="thread">{escape(thread)}</text>')
        top += 6
        for span in wide:
            left, y = _LEFT + span.start * scale, top + span.depth * _ROW
            width = (min(span.end, start.first) - span.start) * scale
            label = f"{span.name.removeprefix('prejit.runtime.')} {span.end - span.start:.0f}"
            parts.append(
                f'<rect x="{left:.1f}" y="{y}" width="{max(width - 0.5, 0.5):.1f}" height="{_ROW - 2}" '
                f'fill="{KINDS[span.kind]}"><title>{escape(span.name)}: {span.start:.1f} to '
                f"{span.end:.1f} ms ({escape(span.kind)})</title></rect>"
            )
            if width > 6.2 * len(label):
                parts.append(
                    f'<text x="{left + 3:.1f}" y="{y + 13}" class="in">{escape(label)}</text>'
                )
        top += _ROW * (1 + max(span.depth for span in wide)) + 18
    ticks = []
    step = 50 if start.first < 800 else 100
    for at in range(0, int(start.first) + 1, step):
        place = f"{_LEFT + at * scale:.1f}"
        ticks.append(f'<line x1="{place}" x2="{place}" y1="46" y2="{top - 12}" class="tick"/>')
        ticks.append(f'<text x="{place}" y="42" class="small">{at}</text>')
    shown = {span.kind for span in start.spans}
    x = _LEFT
    legend = []
    for kind, colour in KINDS.items():
        if kind not in shown:
            continue
        if x + 26 + 6.6 * len(kind) > _WIDTH:
            x, top = _LEFT, top + 18
        legend.append(f'<rect x="{x}" y="{top - 9}" width="10" height="10" fill="{colour}"/>')
        legend.append(f'<text x="{x + 14}" y="{top}" class="small">{escape(kind)}</text>')
        x += int(26 + 6.6 * len(kind))
    height = top + 14
    style = (
        "text { font: 12px system-ui, sans-serif; fill: #1f2328 } .title { font-weight: 600 } "
        ".thread, .small { fill: #59636e; font-size: 11px } .in { fill: #ffffff; font-size: 11px } "
        ".tick { stroke: #d0d7de }"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" '
        f'height="{height}" role="img" aria-label="{escape(title)}">\n<style>{style}</style>\n'
        f'<rect width="{_WIDTH}" height="{height}" rx="6" fill="#ffffff"/>\n'
        f'<text x="{_LEFT}" y="22" class="title">{escape(title)}: {start.first:.0f} ms from exec to the '
        f"first token</text>\n" + "\n".join([*ticks, *parts, *legend]) + "\n</svg>\n"
    )


def table(start: Start, all_first: list[float], title: str) -> str:
    """Return Markdown: milliseconds of each kind in the main thread and in the others."""
    totals = own_time(start)
    others = {
        kind: sum(own[kind] for thread, own in totals.items() if thread != MAIN) for kind in KINDS
    }
    low, high = min(all_first), max(all_first)
    lines = [
        f"# {title}",
        "",
        f"Median of {len(all_first)} fresh processes: {start.first:.0f} ms from exec to the first token "
        f"({low:.0f} to {high:.0f}); {start.modules} modules; load average {os.getloadavg()[0]:.1f}.",
        "",
        "| part | main thread, ms | other threads, ms |",
        "| --- | --- | --- |",
    ]
    for kind in KINDS:
        mine, theirs = totals[MAIN][kind], others[kind]
        if max(mine, theirs) >= 0.05:
            lines.append(f"| {kind} | {mine:.1f} | {theirs:.1f} |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Measure, and write picture, table and spans."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle")
    parser.add_argument("-o", "--output", type=Path, required=True, help="prefix of the files")
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--title", default="Start of a bundle")
    given = parser.parse_args()
    measured(given.bundle)  # fills the page cache, writes receipts and bytecode
    starts = sorted((measured(given.bundle) for _ in range(given.runs)), key=lambda one: one.first)
    middle = starts[len(starts) // 2]
    firsts = [one.first for one in starts]
    page = table(middle, firsts, given.title)
    given.output.with_suffix(".svg").write_text(picture(middle, given.title))
    given.output.with_suffix(".md").write_text(page)
    facts: dict[str, Any] = {
        "first_milliseconds": [round(value, 2) for value in firsts],
        "median": round(statistics.median(firsts), 2),
        "spans": [
            [s.kind, s.name, s.thread, round(s.start, 3), round(s.end, 3)]
            for s in middle.spans
            if s.end - s.start >= 0.1
        ],
    }
    given.output.with_suffix(".json").write_text(json.dumps(facts, separators=(",", ":")) + "\n")
    print(page)


if __name__ == "__main__":
    main()
