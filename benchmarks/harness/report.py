"""Turn samples into tables, targets and text. Pure functions; standard library only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.harness.fresh_processes import Sample, Spread, spread

MB = 1e6
Samples = Mapping[str, list[Sample]]

JAX_COLD, JAX_WARM = "JAX, cold jit", "JAX, persistent cache"


@dataclass(frozen=True)
class Target:
    """A figure, and the limit that it should meet.

    Attributes:
        what: name of the figure.
        found: measured value.
        limit: largest value allowed, or the smallest with `at_least`.
        unit: text after both values.
        at_least: whether the limit is the smallest value allowed.
    """

    what: str
    found: float
    limit: float
    unit: str = ""
    at_least: bool = False

    @property
    def met(self) -> bool:
        """Return whether the figure meets its limit."""
        return self.found >= self.limit if self.at_least else self.found <= self.limit

    def row(self) -> tuple[str, str, str, str]:
        """Return a row of the table of targets."""
        bound = f"{'at least' if self.at_least else 'at most'} {self.limit:.4g}{self.unit}"
        return self.what, f"{self.found:.3g}{self.unit}", bound, "met" if self.met else "**missed**"


@dataclass(frozen=True)
class Table:
    """A table of a section.

    Attributes:
        title: its title.
        head: heads of its columns.
        rows: cells of its rows.
        note: text below it.
        runs: number of fresh processes of each row, such as `5` or `1 to 15`; empty: that of the whole run.
    """

    title: str
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    note: str = ""
    runs: str = ""

    def transposed(self) -> Table:
        """Return the same table with its rows as columns."""
        head, *rows = zip(self.head, *self.rows, strict=True)
        return replace(self, head=head, rows=rows)

    def markdown(self) -> str:
        """Return the table as Markdown."""
        lines = [self.head, tuple("---" for _ in self.head), *self.rows]
        text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        runs = f"Fresh processes of each row: {self.runs}.\n\n" if self.runs else ""
        return f"## {self.title}\n\n{runs}{text}\n" + (f"\n{self.note}\n" if self.note else "")


def runs(sections: Iterable[Samples]) -> str:
    """Return how many processes the rows of some sections have, such as `5` or `1 to 15`."""
    counts = sorted({len(found) for rows in sections for found in rows.values()})
    return " to ".join(map(str, dict.fromkeys((*counts[:1], *counts[-1:]))))


def cell(samples: Sequence[Sample], key: str, digits: int = 2, scale: float = 1) -> str:
    """Return `median [least..greatest]` of one figure."""
    s = spread(samples, key)
    low, high = s.low / scale, s.high / scale
    return f"{s.median / scale:.{digits}f} [{low:.{digits}f}..{high:.{digits}f}]"


def median(samples: Sequence[Sample], key: str) -> float:
    """Return the median of one figure."""
    return spread(samples, key).median


def ratio_within_rounds(samples: Samples, name: str, other: str, key: str) -> float:
    """Return one row's figure divided by another's: the median of the ratios within each round.

    The speed of a virtual machine drifts more between rounds than within one.
    """
    pairs = zip(samples[name], samples[other], strict=True)
    return Spread.of([mine[key] / theirs[key] for mine, theirs in pairs]).median


def same_tokens(rows: Samples) -> bool:
    """Return whether every process of every row gave the same tokens."""
    return len({tuple(s["tokens"]) for row in rows.values() for s in row if "tokens" in s}) == 1


def flat(rows: Samples, failures: Mapping[str, str]) -> tuple[list[Table], list[Target]]:
    """Return the tables of starts of small and large bundles."""
    what = {
        "tiny-4": "5 MB of weights, 4 programs",
        "tiny-400": "5 MB of weights, 400 programs",
        "gpt2-4": "500 MB of weights, 4 programs",
        "llama-1b-float32": "5 GB of weights, 4 programs",
    }
    lines = [
        (
            what[name],
            cell(samples, "loaded_seconds"),
            cell(samples, "first_seconds"),
            cell(samples, "rss_bytes", 0, MB),
        )
        for name, samples in rows.items()
    ]
    table = Table(
        "Start-up of small and large bundles",
        ("", "exec → loaded, s", "exec → 1st token, s", "peak RSS, MB"),
        lines,
        "\n".join(
            [
                "The first token reads all weights of a dense model; loading reads none.",
                *(f"Not there: {name}: {reason}." for name, reason in failures.items()),
            ]
        ),
    )
    targets = []
    for name, other, key, shown in (
        ("tiny-400", "tiny-4", "first_seconds", "exec → 1st token, 400 programs to 4"),
        ("gpt2-4", "tiny-4", "loaded_seconds", "exec → loaded, 500 MB of weights to 5 MB"),
        ("llama-1b-float32", "tiny-4", "loaded_seconds", "exec → loaded, 5 GB of weights to 5 MB"),
    ):
        if name in rows and other in rows:
            targets.append(Target(shown, ratio_within_rounds(rows, name, other, key), 1.1, " x"))
    return [table], targets


def markdown(
    facts: Mapping[str, Any],
    tables: Sequence[Table],
    targets: Sequence[Target],
    pictures: Sequence[str] = (),
    command: str = "make bench",
) -> str:
    """Return the whole page.

    Args:
        facts: facts about the run.
        tables: tables in order.
        targets: targets, in a table of their own.
        pictures: names of pictures beside the page.
        command: command that repeats the measurement.
    """
    machine, versions = facts["machine"], facts["versions"]
    missed = sum(not target.met for target in targets)
    verdict = f"{missed} of {len(targets)} targets missed" if missed else "all targets met"
    busy = max(machine["load_average"], facts["load_average_after"] - 2)
    count = "" if tables and all(table.runs for table in tables) else f"{facts['runs']} "
    head = (
        f"# Benchmark of {facts['date']}: {verdict}\n\n"
        f"{machine['cpu']} (family/model {machine['family_model']}"
        f"{', AVX-512' if machine['avx512'] else ''}), {machine['cores']} cores used, "
        f"{machine['memory_bytes'] / 2**30:.0f} GB, Linux {machine['kernel']}; "
        + ", ".join(f"{name} {version}" for name, version in versions.items())
        + f".\nMedians [least..greatest] of {count}fresh processes, all rows in turn after one "
        "round that was thrown away; ratios are medians of the ratios within each round. "
        f"`{command}` repeats it.\n"
    )
    if busy > 0.5:
        head += (
            f"\n**The machine was not quiet** (load {machine['load_average']:.1f} before): "
            "the figures are for debugging.\n"
        )
    goals = Table(
        "Targets", ("", "found", "wanted", ""), [target.row() for target in targets]
    ).markdown()
    image = "".join(f"![figures as bars]({picture})\n" for picture in pictures)
    return "\n".join(part for part in (head, image, goals, *(t.markdown() for t in tables)) if part)
