"""Compare rows: tables, and ratios to the best peer of each column. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.harness import workload
from benchmarks.harness.fresh_processes import Row, Sample, Spread, spread
from benchmarks.harness.report import (
    JAX_WARM,
    MB,
    Samples,
    Table,
    Target,
    cell,
    median,
    ratio_within_rounds,
)

REFERENCE = JAX_WARM
"""Name of the row whose tokens are the reference. Without it the first float32 row is."""


SAME_SUM = 1e-3
"""Largest difference allowed in one value of up to 64 embeddings: engines add in different orders."""


@dataclass(frozen=True)
class Column:
    """A column of the table: one figure of every row.

    Attributes:
        key: name of the figure in a sample.
        title: head of the column, with the unit.
        digits: digits after the decimal point.
        scale: divisor from the samples' unit to the title's.
        more: whether more is better.
    """

    key: str
    title: str
    digits: int = 2
    scale: float = 1
    more: bool = False


FIRST = Column("first_seconds", "exec → 1st token, s")
LAST = Column("last_seconds", "exec → 64th token, s")
DECODE = Column("decode_tokens_per_second", "decode, tokens/s", 1, more=True)
PREFILL = Column("prefill_tokens_per_second", "prefill, tokens/s", 0, more=True)
RSS = Column("rss_bytes", "peak RSS, MB", 0, MB)
PRIVATE = Column("peak_anonymous_bytes", "peak private, MB", 0, MB)
CPU = Column("cpu_seconds", "CPU, s", 1)
EMBEDDING = Column("first_seconds", "exec → 1st embedding, s")
LATENCIES = tuple(
    Column(f"{batch}x{length}", f"{batch}x{length}, ms", 2, 1e-3)
    for batch, length in workload.ENCODER_SHAPES
)
"""Latency of each shape of the encoder."""


@dataclass(frozen=True)
class Goal:
    """The ratio that prejit's row should reach to a peer's.

    Attributes:
        column: column of the figure.
        dtype: dtype of the weights of prejit's row and of its peers.
        limit: largest ratio allowed, or the smallest where more is better.
        against: prefixes of the peers' names; empty: all peers of that dtype.
    """

    column: Column
    dtype: str
    limit: float
    against: tuple[str, ...] = ()


@dataclass(frozen=True)
class Compared:
    """prejit's row compared with the best peer in one column.

    Attributes:
        column: column of the figure.
        row: name of prejit's row.
        peer: name of the best peer.
        ratio: prejit's figure divided by the peer's: the median of the ratios within each round.
    """

    column: Column
    row: str
    peer: str
    ratio: float

    @property
    def ahead(self) -> bool:
        """Return whether prejit is at least as good."""
        return self.ratio >= 1 if self.column.more else self.ratio <= 1


def ours(name: str) -> bool:
    """Return whether a row is prejit's."""
    return name.startswith("prejit")


def best_peer(
    samples: Samples, rows: Sequence[Row], column: Column, dtype: str, against: tuple[str, ...] = ()
) -> str | None:
    """Return the peer with the best median in a column, or None without peers.

    Args:
        samples: samples of all rows.
        rows: rows that ran.
        column: column of the figure.
        dtype: dtype of the peers' weights.
        against: prefixes of the names that count; empty: all.
    """
    names = [
        row.name
        for row in rows
        if row.dtype == dtype
        and not ours(row.name)
        and (row.name.startswith(against) if against else True)
        and _has(samples, row.name, column)
    ]
    choose = max if column.more else min
    return choose(names, key=lambda name: median(samples[name], column.key), default=None)


def _has(samples: Samples, name: str, column: Column) -> bool:
    return bool(samples.get(name)) and column.key in samples[name][0]


def compare(samples: Samples, rows: Sequence[Row], columns: Sequence[Column]) -> list[Compared]:
    """Compare each row of prejit with the best peer of its dtype, column by column."""
    found = []
    for row in rows:
        for column in columns:
            if not (ours(row.name) and _has(samples, row.name, column)):
                continue
            peer = best_peer(samples, rows, column, row.dtype)
            if peer is not None:
                ratio = ratio_within_rounds(samples, row.name, peer, column.key)
                found.append(Compared(column, row.name, peer, ratio))
    return found


def agreement(samples: Samples, rows: Sequence[Row]) -> dict[str, str]:
    """Return how many tokens of each row equal the reference's before the first difference, as `64/64`.

    If the processes of a row differ, the least counts. Low precision differs with random weights.
    """
    floats = [row.name for row in rows if row.dtype == "float32" and samples.get(row.name)]
    if not floats:
        return {}
    reference = samples[REFERENCE if REFERENCE in floats else floats[0]][0]["tokens"]
    return {
        name: f"{min(_common(sample['tokens'], reference) for sample in found)}/{len(reference)}"
        for name, found in samples.items()
        if found
    }


def _common(tokens: Sequence[int], reference: Sequence[int]) -> int:
    pairs = zip(tokens, reference, strict=False)
    return next(
        (place for place, (a, b) in enumerate(pairs) if a != b), min(len(tokens), len(reference))
    )


def different_embeddings(samples: Samples, rows: Sequence[Row]) -> list[str]:
    """Return the float32 rows whose embeddings differ from those of the first such row, by their sums."""
    names = [row.name for row in rows if row.dtype == "float32" and samples.get(row.name)]
    if not names:
        return []
    reference = samples[names[0]][0]["sums"]
    return [
        name
        for name in names
        for sample in samples[name][:1]
        if any(abs(sample["sums"][shape] - reference[shape]) > SAME_SUM for shape in reference)
    ]


def floor_share(samples: Sequence[Sample], step_bytes: int) -> Spread:
    """Return the decode rate as a share of what the memory bandwidth allows.

    Args:
        samples: samples of a row, each with the bandwidth that was probed before it.
        step_bytes: bytes that a step must read.
    """
    return Spread.of(
        [s["decode_tokens_per_second"] * step_bytes / s["probe_bytes_per_second"] for s in samples]
    )


def tables(
    title: str,
    rows: Sequence[Row],
    samples: Samples,
    columns: Sequence[Column],
    failures: Mapping[str, str],
    step_bytes: Callable[[str], int] | None = None,
    note: str = "",
) -> list[Table]:
    """Return the tables of a section: its figures, and prejit's ratios to its peers.

    Args:
        title: title of the section.
        rows: rows in the order of the table.
        samples: samples of the rows that ran.
        columns: columns of the table.
        failures: reasons by the name of a row that is missing.
        step_bytes: bytes of weights that a decode step reads, by dtype; adds the share of the bandwidth.
        note: text below the table, after the notes on the probe and on failures.
    """
    head = ["", *(column.title for column in columns)]
    if step_bytes:
        head.append("of floor")
    agree = agreement(samples, rows) if "tokens" in _any_sample(samples) else {}
    if agree:
        head.append("tokens as reference")
    lines = []
    for row in rows:
        found = samples.get(row.name)
        if not found:
            continue
        line = [f"**{row.name}**" if ours(row.name) else row.name]
        line += [
            cell(found, column.key, column.digits, column.scale)
            if _has(samples, row.name, column)
            else ""
            for column in columns
        ]
        if step_bytes:
            line.append(f"{100 * floor_share(found, step_bytes(row.dtype)).median:.0f} %")
        if agree:
            line.append(agree[row.name])
        lines.append(tuple(line))
    notes = [note] if note else []
    if step_bytes and samples:
        probes = [s for found in samples.values() for s in found]
        notes.insert(0, _floor_note(probes, step_bytes))
    notes += [f"Not there: {name}: {reason}." for name, reason in failures.items()]
    made = [Table(title, tuple(head), lines, "\n".join(notes))]
    ratios = compare(samples, rows, columns)
    if ratios:
        made.append(_ratio_table(f"{title}: prejit to the best peer of each column", ratios))
    return made


def _any_sample(samples: Samples) -> Sample:
    return next((found[0] for found in samples.values() if found), {})


def _floor_note(probes: Sequence[Sample], step_bytes: Callable[[str], int]) -> str:
    rate = spread(probes, "probe_bytes_per_second")
    steps = ", ".join(
        f"{dtype} {step_bytes(dtype) / MB:.1f} MB: {rate.median / step_bytes(dtype):.0f}"
        for dtype in workload.BYTES
    )
    return (
        "Floor: two threads read the mapped float32 weights, just before each process, at "
        f"{cell(probes, 'probe_bytes_per_second', 1, 1e9)} GB/s; tokens/s at that rate, by what a step "
        f"reads: {steps}. A row's share is of the bandwidth probed before it."
    )


def _ratio_table(title: str, ratios: Sequence[Compared]) -> Table:
    columns = list(dict.fromkeys(r.column.title for r in ratios))
    names = list(dict.fromkeys(r.row for r in ratios))
    found = {(r.row, r.column.title): r for r in ratios}
    lines = []
    for name in names:
        line = [name]
        for column in columns:
            compared = found.get((name, column))
            if compared is None:
                line.append("")
                continue
            mark = "**" if compared.ahead else ""
            line.append(f"{mark}{compared.ratio:.2f}{mark} x {compared.peer}")
        lines.append(tuple(line))
    note = "Medians of the ratios within each round; **bold**: as good as that peer, or better."
    return Table(title, ("", *columns), lines, note)


def targets(
    title: str, goals: Sequence[Goal], rows: Sequence[Row], samples: Samples
) -> list[Target]:
    """Return the goals whose peers ran, as ratios to the best of those."""
    made = []
    for goal in goals:
        mine = f"prejit {goal.dtype}"
        peer = best_peer(samples, rows, goal.column, goal.dtype, goal.against)
        if peer is None or not _has(samples, mine, goal.column):
            continue
        ratio = ratio_within_rounds(samples, mine, peer, goal.column.key)
        what = f"{title}{goal.dtype}: {goal.column.title.rpartition(',')[0]}, to {peer}"
        made.append(Target(what, ratio, goal.limit, " x", at_least=goal.column.more))
    return made
