"""The verdict of a gate as a table, JSON, Markdown for a pull request, and a page."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from prejit.runtime.base.wording import shortened, table
from prejit.runtime.errors import printable
from prejit.server.releases.gate_run import GateVerdict
from prejit.server.releases.release_contents import described_limits

_HEAD = ("check", "verdict", "old", "new", "why")
_TEMPLATE = Path(__file__).parent / "templates" / "gate.html"
_MOST_DIFFERENCES = 20
_WIDTH = 100
"""Maximum characters of a cell on a terminal."""


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
        ]
        lines += ["| --- | --- | --- |"]
        lines += [
            f"| {_cell(each.id)} | {_cell(each.path)} | {_cell(each.reason)} |"
            for each in verdict.differences[:_MOST_DIFFERENCES]
        ]
        lines += ["", "</details>"]
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
