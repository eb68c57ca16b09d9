"""Compare prejit with what a user would otherwise pick, in fresh processes that take turns: `make bench`.

    python -m benchmarks.sections --quick         JAX and llama.cpp, 5 minutes; the first time 20 more
    python -m benchmarks.sections                 every peer and section, hours at first: `make bench-full`
    python -m benchmarks.sections --only prefill  one section
    python -m benchmarks.sections --row int8,JAX  rows with one of these in their names
    python -m benchmarks.sections --only prefill --model llama-3b --tokens 2048
                                                  one model, prompts of one length

Two threads, the same weights, medians with their spread. A whole run writes benchmarks/results/: peers.json
(every sample), peers.md and peers.svg, or peers-quick.*; a part of one writes to $PREJIT_BENCH_DIR/results,
one section to peers-SECTION.*.
Run it on a machine that does nothing else. $PREJIT_BENCH_DIR (default ~/.cache/prejit/bench) keeps models,
bundles and the peers' environments: 3 GB for the quick form, 150 GB for all.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import cold as cold_starts
from benchmarks.harness import chart, cold_report, comparison, family_models, report, workload
from benchmarks.harness.comparison import (
    CPU,
    DECODE,
    EMBEDDING,
    FIRST,
    LAST,
    LATENCIES,
    PREFILL,
    PRIVATE,
    RSS,
    Column,
    Goal,
)
from benchmarks.harness.fresh_processes import (
    FailedProcessError,
    Row,
    Sample,
    Spread,
    clock,
    interleave,
    progress,
    run_once,
    spread,
)
from benchmarks.harness.report import Table, Target
from benchmarks.harness.results import RESULTS, begin, judged, option_parser, save, use_two_cores
from benchmarks.harness.workspace import Bench, bench_directory, digest_now, sources_digest
from benchmarks.peers import entrants
from benchmarks.peers.entrants import Work


@dataclass
class Run:
    """The options of a run, and its results so far.

    Attributes:
        bench: directory, and number of rounds.
        wanted: parts of the names of rows to run, with commas.
        model: model of the sections that measure several; empty: all.
        tokens: lengths of prompts of these sections; empty: the usual.
        samples: samples by section, then by row.
        failures: reasons by section, then by row.
        rows: rows by section.
        pictures: pictures by section.
    """

    bench: Bench
    wanted: str
    model: str
    tokens: Sequence[int]
    samples: dict[str, dict[str, list[Sample]]] = field(default_factory=dict)
    failures: dict[str, dict[str, str]] = field(default_factory=dict)
    rows: dict[str, list[Row]] = field(default_factory=dict)
    pictures: dict[str, str] = field(default_factory=dict)


Found = tuple[list[Table], list[Target]]
Section = Callable[[Run], Found]

_BOTH = ("float32", "int8")
_DECODE_GOALS = (
    *(Goal(FIRST, dtype, 1.0, ("llama.cpp",)) for dtype in _BOTH),
    Goal(FIRST, "float32", 0.3, (report.JAX_WARM,)),
    *(Goal(LAST, dtype, 1.0) for dtype in workload.BYTES),
    Goal(DECODE, "float32", 1.0),
    Goal(DECODE, "int8", 1.25, ("llama.cpp", "ONNX Runtime")),
    Goal(DECODE, "bfloat16", 1.1, ("llama.cpp",)),
    *(Goal(RSS, dtype, 1.1) for dtype in workload.BYTES),
)
FLOOR_SHARE = 92
"""Percent of the memory bandwidth that float32 decode should reach."""


def beside_peers(
    run: Run,
    name: str,
    title: str,
    work: Work,
    columns: Sequence[Column],
    goals: Sequence[Goal],
    step_bytes: Callable[[str], int] | None = None,
    note: str = "",
) -> Found:
    """Run the same work with every entrant, and compare them.

    Args:
        run: options and results of the run.
        name: name of the section.
        title: title of the table.
        work: work that every entrant does.
        columns: columns of the table.
        goals: goals of prejit's rows.
        step_bytes: bytes of weights that a decode step reads, by dtype; adds the share of the bandwidth.
        note: text below the table.
    """
    bench = run.bench
    failures = run.failures.setdefault(name, {})
    rows = run.rows[name] = entrants.rows(bench, work, run.wanted, failures)
    if not rows:
        return [], []
    probe = (
        Row("bandwidth probe", ("peers/bandwidth_child.py", bench.weights)) if step_bytes else None
    )
    samples = run.samples[name] = interleave(rows, bench.runs, probe, failures)
    for sample in (sample for found in samples.values() for sample in found):
        sample |= sample.get("steady", {})  # latencies are columns
    if step_bytes:
        progress("memory, in processes of their own")
        for row in rows:
            if row.name in samples:
                try:
                    polled = run_once(row, poll_memory=True)["peak_anonymous_bytes"]
                except FailedProcessError as error:
                    progress(f"no memory: {error}")
                    continue
                for sample in samples[row.name]:
                    sample["peak_anonymous_bytes"] = polled
    made = comparison.tables(title, rows, samples, columns, failures, step_bytes, note)
    targets = comparison.targets(f"{name}, ", goals, rows, samples)
    floats = samples.get(entrants.PREJIT["float32"])
    if step_bytes and floats:
        share = 100 * comparison.floor_share(floats, step_bytes("float32")).median
        what = f"{name}, float32: decode, of the floor"
        targets.append(Target(what, share, FLOOR_SHARE, " %", at_least=True))
    return made, targets


def cold(run: Run) -> Found:
    """Measure first starts: no receipt, a cold disk, a fresh root, one CPU, little memory."""
    if run.bench.quick:
        quick = replace(run.bench, runs=min(run.bench.runs, 3))
        return _first_starts(run, "cold", quick, "gpt2", ("float32", "int8"))
    return _first_starts(run, "cold", run.bench, "gpt2", tuple(workload.BYTES))


def cold_llama(run: Run) -> Found:
    """Measure first starts of a model of a billion parameters."""
    return _first_starts(run, "cold-llama", run.bench, "llama-1b", ("bfloat16", "int8"))


def _first_starts(run: Run, name: str, bench: Bench, model: str, dtypes: tuple[str, ...]) -> Found:
    """Measure first starts of one model, a key of cold.TITLES, as the section of this name."""
    found = cold_starts.measure(bench, model, dtypes, run.wanted)
    run.samples |= {f"{name}, {where}": dict(rows) for where, rows in found.samples.items()}
    run.failures |= {f"{name}, {where}": reasons for where, reasons in found.failures.items()}
    drawn = {cold_starts.TITLES[model]: found.samples}
    run.pictures[name] = cold_report.picture(drawn, found.targets)
    return found.tables, found.targets


def decode(run: Run) -> Found:
    """Measure the main rows: exec to the first and the last token, decode, memory."""
    shutil.rmtree(run.bench.warm["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
    tables, targets = beside_peers(
        run,
        "decode",
        "GPT-2 124M, batch 1, 32 tokens in, 64 out",
        Work("generate", "gpt2"),
        (FIRST, LAST, DECODE, RSS, PRIVATE, CPU),
        _DECODE_GOALS,
        workload.decode_bytes,
        "Private memory is anonymous memory (not the page cache), its peak polled in a process of its own. "
        f"Tokens are compared with {comparison.REFERENCE}'s; with random weights low precision differs soon.",
    )
    samples = run.samples.get("decode", {})
    floats = [
        row.name
        for row in run.rows["decode"]
        if row.dtype == "float32" and row.name in samples and samples[row.name]
    ]
    agree = comparison.agreement(samples, run.rows["decode"])
    length = workload.NEW_TOKENS
    different = sum(agree[name] != f"{length}/{length}" for name in floats)
    targets.append(Target("float32 rows whose tokens differ", different, 0))
    programs = [
        how
        for name, found in samples.items()
        if comparison.ours(name)
        for sample in found
        for how in sample["programs"].values()
    ]
    targets.append(
        Target("programs compiled at run time", sum(how != "loaded" for how in programs), 0)
    )
    return tables, targets


_NARROW = ("bfloat16", "int8", "int4")
_MODELS = {
    "gpt2": ("GPT-2 124M", tuple(workload.BYTES)),
    "qwen3-600m": ("Qwen3 0.6B's shape", _NARROW),
    "llama-1b": ("Llama's shape with 1.24 billion parameters", _NARROW),
    "llama-3b": ("Llama's shape with 3.2 billion parameters", _NARROW),
}
"""Title and dtypes of the models that are measured in batches and with longer prompts."""


def _measured(run: Run, *but: str) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield name, title and dtypes of the models that a section measures: all, or the one that is wanted."""
    for model, (title, dtypes) in _MODELS.items():
        if model not in but and run.model in ("", model):
            yield model, title, dtypes


def batch(run: Run) -> Found:
    """Measure batches of several rows."""
    found = [
        beside_peers(
            run,
            f"{model}, batch {size}",
            f"{title}, batch {size}, 32 tokens in, 64 out for each row",
            Work("generate", model, size, dtypes),
            (FIRST, LAST, DECODE, RSS),
            [Goal(DECODE, dtype, 1.0) for dtype in dtypes],
            note="Decode counts the tokens of all rows; tokens are compared in the first. OpenVINO's "
            "pipeline does not tell when a step of several rows is done, so it is not here.",
        )
        for model, title, dtypes in _measured(run)
        for size in workload.BATCHES
    ]
    return _joined(found)


def prefill(run: Run) -> Found:
    """Measure prompts in a warm process."""
    least, most = workload.PREFILL_RUNS
    found = [
        beside_peers(
            run,
            f"{model}, prefill of {tokens}",
            f"{title}, a prompt of {tokens} tokens in a warm process",
            Work("prefill", model, dtypes=dtypes, tokens=tokens),
            (PREFILL, RSS),
            [
                Goal(PREFILL, dtype, 1.0 if dtype == "float32" else 0.8, ("OpenVINO",))
                for dtype in dtypes
            ],
            note=f"Median of {least} to {most} prompts of each process, no two alike.",
        )
        for model, title, dtypes in _measured(run)
        for tokens in run.tokens or workload.PREFILL_TOKENS
        if model != "gpt2" or tokens < workload.POSITIONS
    ]
    return _joined(found)


def _joined(found: Sequence[Found]) -> Found:
    return [t for tables, _ in found for t in tables], [t for _, targets in found for t in targets]


def encoder(run: Run) -> Found:
    """Measure an encoder of MiniLM's sizes."""
    tables, targets = beside_peers(
        run,
        "encoder",
        "An encoder of MiniLM's sizes, sentences x tokens",
        Work("encode", "minilm"),
        (EMBEDDING, *LATENCIES, RSS),
        [Goal(EMBEDDING, "float32", 1.0, ("CTranslate2",))],
        note="Latency is the median in a warm process, of at least five runs.",
    )
    samples, rows = run.samples.get("encoder", {}), run.rows["encoder"]
    compared = comparison.compare(samples, rows, LATENCIES)
    for name in dict.fromkeys(each.row for each in compared):
        behind = [each for each in compared if each.row == name and not each.ahead]
        targets.append(Target(f"{name}: shapes in which a peer is faster", len(behind), 0))
    different = comparison.different_embeddings(samples, rows)
    targets.append(Target("float32 rows whose embeddings differ", len(different), 0))
    return [table.transposed() for table in tables], targets


def llama(run: Run) -> Found:
    """Measure a model of a billion parameters."""
    return _of_llama(run, "llama-1b", "1.24", workload.LLAMA_1B)


def llama_3b(run: Run) -> Found:
    """Measure a model of three billion parameters."""
    return _of_llama(run, "llama-3b", "3.2", workload.LLAMA_3B)


def _of_llama(run: Run, name: str, billions: str, sizes: workload.Llama) -> Found:
    title = f"Llama's shape with {billions} billion parameters, batch 1, 32 tokens in, 64 out"
    work = Work("generate", name, dtypes=_NARROW)
    columns = (FIRST, LAST, DECODE, RSS, PRIVATE, CPU)
    return beside_peers(run, name, title, work, columns, [], partial(workload.llama_bytes, sizes))


def long_prompts(run: Run) -> Found:
    """Measure texts that go on after long prompts."""
    found = [
        beside_peers(
            run,
            f"{model}, after {tokens}",
            f"{title}, {tokens} tokens in, 64 out",
            Work("generate", model, dtypes=dtypes, tokens=tokens),
            (FIRST, DECODE, RSS),
            [Goal(DECODE, dtype, 1.0) for dtype in dtypes],
        )
        for model, title, dtypes in _measured(run, "gpt2")
        for tokens in run.tokens or workload.LONG_PROMPTS
    ]
    return _joined(found)


def qwen3(run: Run) -> Found:
    """Measure a model of half a billion parameters, with a large vocabulary."""
    title = "Qwen3 0.6B's shape, batch 1, 32 tokens in, 64 out"
    return _of_family(run, "qwen3", "qwen3-600m", title)


def mixture(run: Run) -> Found:
    """Measure a mixture of experts."""
    title = "OLMoE 1B-7B, 4 of 16 layers, 8 of 32 experts, batch 1, 32 tokens in, 64 out"
    return _of_family(run, "mixture", "olmoe-part", title)


def hybrid(run: Run) -> Found:
    """Measure a hybrid of short convolutions and attention."""
    title = "LFM2 1.2B, 8 of 16 layers, batch 1, 32 tokens in, 64 out"
    return _of_family(run, "hybrid", "lfm2-part", title)


def _of_family(run: Run, name: str, model: str, title: str) -> Found:
    work = Work("generate", model, dtypes=_NARROW)
    goals = [Goal(DECODE, dtype, 1.0) for dtype in _NARROW]
    columns = (FIRST, LAST, DECODE, RSS, PRIVATE, CPU)
    step = partial(family_models.step_bytes, model)
    return beside_peers(run, name, title, work, columns, goals, step)


FLAT_PROGRAMS: dict[str, workload.Sizes] = {
    "tiny-4": {"batch": (1,), "prompt": (32,), "context": (800, 1024)},
    "tiny-400": {
        "batch": (1, 2, 4, 8),
        "prompt": tuple(range(32, 32 * 25, 32)),
        "context": (800, 864, 928, 1024),
    },
}


def flat(run: Run) -> Found:
    """Measure how start-up depends on the number of programs and on the size of the weights."""
    bench, failures = run.bench, run.failures.setdefault("flat", {})
    rows, vocabulary = [], str(workload.LLAMA_TINY.vocabulary)
    for name, source, sizes in (
        *((name, "llama-tiny", sizes) for name, sizes in FLAT_PROGRAMS.items()),
        ("gpt2-4", "gpt2", workload.FEW),
        ("llama-1b-float32", "llama-1b", workload.FEW),
    ):
        try:
            path = bench.built(name, source, "float32", sizes)
        except FailedProcessError as error:
            failures[name] = str(error)
        else:
            command = ("peers/prejit_child.py", "generate", path, "1", vocabulary)
            rows.append(Row(name, command, bench.prejit))
    samples = run.samples["flat"] = interleave(rows, bench.runs, failures=failures)
    return report.flat(samples, failures)


SECTIONS: dict[str, Section] = {
    "cold": cold,
    "cold-llama": cold_llama,
    "decode": decode,
    "batch": batch,
    "prefill": prefill,
    "encoder": encoder,
    "llama": llama,
    "llama-3b": llama_3b,
    "long-prompts": long_prompts,
    "qwen3": qwen3,
    "mixture": mixture,
    "hybrid": hybrid,
    "flat": flat,
}


def picture(run: Run, targets: Sequence[Target]) -> str:
    """Draw start-up and decode as bars, with their targets."""
    rows, samples = run.rows["decode"], run.samples["decode"]
    names = [row.name for row in rows if row.name in samples]

    def bars(column: Column) -> list[tuple[str, Spread, bool]]:
        found = [(name, spread(samples[name], column.key), comparison.ours(name)) for name in names]
        return sorted(found, key=lambda bar: bar[1].median, reverse=column.more)

    probes = [sample for found in samples.values() for sample in found]
    floor = spread(probes, "probe_bytes_per_second").median / workload.decode_bytes()
    panels = [
        chart.Panel("From exec to the first token, seconds (less is better)", bars(FIRST), "s"),
        chart.Panel("From exec to the 64th token, seconds (less is better)", bars(LAST), "s"),
        chart.Panel(
            "Decode, tokens per second (more is better)",
            bars(DECODE),
            "/s",
            (floor, f"two threads reading float32 weights: {floor:.0f} /s"),
        ),
    ]
    goals = [(f"{t.what}: {t.row()[1]}, wanted {t.row()[2]}", t.met) for t in targets]
    return chart.draw(panels, goals)


def write_results(
    directory: Path,
    name: str,
    run: Run,
    facts: dict[str, Any],
    tables: list[Table],
    targets: list[Target],
) -> None:
    """Write samples, page and picture."""
    directory.mkdir(parents=True, exist_ok=True)
    content = {
        **facts,
        "samples": run.samples,
        "failures": run.failures,
        "targets": judged(targets),
    }
    pictures = {
        f"{name.removesuffix(f'-{section}')}-{section}.svg": drawn
        for section, drawn in run.pictures.items()
    }
    if run.samples.get("decode"):
        of_decode = [t for t in targets if t.what.startswith("decode, ")]
        pictures[f"{name}.svg"] = picture(run, of_decode)
    for file, drawn in pictures.items():
        (directory / file).write_text(drawn)
    page = report.markdown(facts, tables, targets, tuple(pictures))
    if facts["sources_changed"]:
        page += (
            "\n**prejit's sources changed while this ran:** its rows are of the bundles' state.\n"
        )
    save(directory, name, content, page)


def main() -> None:
    """Parse the command line, measure, and write the results."""
    parser = option_parser()
    parser.add_argument(
        "--runs", type=int, default=5, help="fresh processes of each row (default 5)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="JAX and llama.cpp, cold and decode alone"
    )
    parser.add_argument("--only", choices=SECTIONS, help="one section")
    parser.add_argument("--row", default="", help="rows with one of these in their names")
    parser.add_argument(
        "--model", default="", choices=_MODELS, help="one model of batch and prompts"
    )
    parser.add_argument("--tokens", default=[], type=int, nargs="+", help="lengths of long prompts")
    given = parser.parse_args()
    bench = Bench(bench_directory(), given.runs, given.quick)
    use_two_cores()
    run = Run(bench, given.row, given.model, given.tokens)
    started = time.perf_counter()
    facts = begin(bench.runs, bundles_of=sources_digest())
    bench.model("gpt2")
    sections = [given.only] if given.only else ["cold", "decode"] if given.quick else list(SECTIONS)
    tables: list[Table] = []
    targets: list[Target] = []
    for place, section in enumerate(sections, 1):
        passed = clock(time.perf_counter() - started)
        progress(f"{section} (section {place} of {len(sections)}, after {passed})")
        earlier = set(run.samples)
        try:
            more_tables, more_targets = SECTIONS[section](run)
        except FailedProcessError as error:
            run.failures.setdefault(section, {})["the section"] = str(error)
            progress(f"{section} failed: {error}")
            more_tables, more_targets = [Table(section, ("failed",), [(str(error),)])], []
        count = report.runs(run.samples[name] for name in run.samples if name not in earlier)
        tables += [replace(table, runs=count) for table in more_tables]
        targets += more_targets
    failed = sum(map(len, run.failures.values()))
    targets.append(Target("rows that failed", failed, 0))
    took_part = {name for found in run.samples.values() for name in found}
    facts |= {
        "versions": {**facts["versions"], **entrants.versions(bench, took_part)},
        "load_average_after": os.getloadavg()[0],
        "sources_changed": digest_now() != sources_digest(),
        "seconds": round(time.perf_counter() - started),
    }
    part = bool(given.only or given.row)
    directory = bench.directory / "results" if part else RESULTS
    name = "peers-quick" if given.quick else "peers"
    if given.only:
        name += f"-{given.only}"
    write_results(directory, name, run, facts, tables, targets)


if __name__ == "__main__":
    main()
