"""The records of drills in drills.json, and the page of benchmarks/results that shows them."""

import json

from .campaign import ROOT, facts, figures_file, write_figures

PAGE = ROOT / "benchmarks" / "results" / "drills.md"
_BEGIN, _END = "<!-- drills.json: begin -->\n\n", "\n<!-- drills.json: end -->"


def keep(name, drill):
    """Write the record of a drill into drills.json, beside those of the others."""
    file = figures_file("drills")
    kept = json.loads(file.read_text()) if file.exists() else {}
    found = {**facts("jax", "jaxlib", "kernel"), **drill}
    write_figures("drills", dict(sorted({**kept, name: found}.items())))


def table(records):
    """Return the records as a table of Markdown, with a line of their dates and versions."""
    columns = ("failure", "clients", "metric", "alert", "what ended it")
    lines = [columns, ("---",) * len(columns)]
    for one in records.values():
        metric = f"`{one['metric']}`" if one["metric"] else "none moves"
        alert = (
            f"`{one['alert']}` after {one['seconds']:.0f} s" if one["alert"] else "none, rightly"
        )
        ended = one["recovery"] or "nothing was needed"
        lines.append((one["failure"], one["clients"], metric, alert, ended))
    text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    made = sorted({(one["date"], one["jax"], one["python"]) for one in records.values()})
    shown = "; ".join(f"{date}, jax {jax}, Python {python}" for date, jax, python in made)
    return f"{text}\n{shown}.\n"


def with_table(text):
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    shown = table(json.loads(figures_file("drills").read_text()))
    return f"{before}{_BEGIN}{shown}{_END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
