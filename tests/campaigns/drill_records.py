"""The records of drills in drills.json, and the page of benchmarks/results that shows them."""

import json
from dataclasses import asdict, dataclass

from .campaign import ROOT, facts, figures_file, write_figures

PAGE = ROOT / "benchmarks" / "results" / "drills.md"
_BEGIN, _END = "<!-- drills.json: begin -->\n\n", "\n<!-- drills.json: end -->"


@dataclass(frozen=True)
class Drill:
    """One failure of production, and what was seen."""

    failure: str
    clients: str
    metric: str
    alert: str
    seconds: float
    recovery: str


def keep(name, drill):
    """Write the record of a drill into drills.json, beside those of the others."""
    file = figures_file("drills")
    kept = json.loads(file.read_text()) if file.exists() else {}
    found = {**facts("jax", "jaxlib", "kernel"), **asdict(drill)}
    write_figures("drills", dict(sorted({**kept, name: found}.items())))


def table(records):
    """Return the records as a table of Markdown, with a line of their dates and versions."""
    columns = ("failure", "clients", "metric", "alert", "what ended it")
    rows = [
        (
            one["failure"],
            one["clients"],
            f"`{one['metric']}`" if one["metric"] else "none moves",
            f"`{one['alert']}` after {one['seconds']:.0f} s" if one["alert"] else "none, rightly",
            one["recovery"] or "nothing was needed",
        )
        for one in records.values()
    ]
    lines = (columns, ("---",) * len(columns), *rows)
    text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    made = sorted(
        {tuple(one[key] for key in ("date", "jax", "python")) for one in records.values()}
    )
    shown = "; ".join(f"{date}, jax {jax}, Python {python}" for date, jax, python in made)
    return f"{text}\n{shown}.\n"


def with_table(text):
    """Return the page with the table of the last figures."""
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    shown = table(json.loads(figures_file("drills").read_text()))
    return f"{before}{_BEGIN}{shown}{_END}{after}"


def main():
    """Write the table into the page."""
    PAGE.write_text(with_table(PAGE.read_text()))


if __name__ == "__main__":
    main()
