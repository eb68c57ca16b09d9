"""Measures prejit against plain JAX, in fresh processes that take turns: `make bench`.

    python benchmarks/run.py                     everything, about 20 minutes on two cores
    python benchmarks/run.py --quick             medians of 3, the main rows only, under 3 minutes
    python benchmarks/run.py --only startup      or kv-cache, buckets, build

A full run writes benchmarks/results/: DATE-MACHINE.json (every sample), latest.md and latest.svg. Run it on
a machine that does nothing else. $PREJIT_BENCH_DIR (default ~/.cache/prejit/bench) keeps the model and the
bundles, about 3 GB.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import chart
import report
import workload
from measure import (
    HERE,
    Row,
    Sample,
    Spread,
    interleave,
    machine,
    progress,
    run_once,
    spread,
    versions,
)
from report import Samples, Table, Target

RESULTS = HERE / "results"
PREJIT_COMMAND = str(Path(sys.executable).parent / "prejit")


@dataclass(frozen=True)
class Bench:
    """Where things are, and how often they are measured.

    Attributes:
        directory: of model, bundles and caches.
        runs: fresh processes of each row.
        quick: the main rows only.
    """

    directory: Path
    runs: int
    quick: bool

    @property
    def weights(self) -> str:
        """The model's weights for plain JAX."""
        return str(self.directory / "gpt2.safetensors")

    def bundle(self, name: str) -> str:
        """A bundle's directory."""
        return str(self.directory / "bundles" / name)

    @property
    def prejit(self) -> dict[str, str]:
        """Environment of prejit's rows: receipts of verified files are kept apart from the user's."""
        return {"PREJIT_RUNTIME_CACHE": str(self.directory / "runtime-cache")}

    @property
    def warm(self) -> dict[str, str]:
        """Environment of a JAX that keeps every executable on disk."""
        return {
            "JAX_COMPILATION_CACHE_DIR": str(self.directory / "jax-cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }

    def build_row(self, name: str, label: str, output: Path, cache: Path) -> Row:
        """A build of one manifest."""
        manifest = str(self.directory / f"{name}.toml")
        options = ("-o", str(output), "--cache", str(cache), "--json")
        return Row(label, (PREJIT_COMMAND, "build", manifest, *options), self.prejit)


def prepare(bench: Bench, names: tuple[str, ...]) -> None:
    """Makes model and bundles where they are missing or stale."""
    progress(f"model and bundles in {bench.directory}")
    run_once(Row("model", ("models.py", str(bench.directory))))
    for name in names:
        progress(f"prejit build {name}.toml ({workload.program_count(name)} programs)")
        row = bench.build_row(
            name, name, bench.directory / "bundles", bench.directory / "build-cache"
        )
        run_once(row)
    shutil.rmtree(bench.warm["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)


def bundle_facts(path: str) -> dict[str, Any]:
    """Of a bundle with one target: the file of its weights, and the size of each executable."""
    root = Path(path)

    def blob(digest: str) -> Path:
        return root / "blobs" / "sha256" / digest.removeprefix("sha256:")

    index = json.loads((root / "index.json").read_bytes())
    manifest = json.loads(blob(index["manifests"][0]["digest"]).read_bytes())
    layers = manifest["layers"]
    weights = next(layer for layer in layers if layer["mediaType"].endswith(".safetensors"))
    programs = json.loads(blob(manifest["config"]["digest"]).read_bytes())["programs"]
    return {
        "weights": str(blob(weights["digest"])),
        "executable_bytes": {p["name"]: p["executable"]["raw_size"] for p in programs},
    }


Section = Callable[[Bench, dict[str, Any]], tuple[list[Table], list[Target]]]


def startup(bench: Bench, samples: dict[str, Any]) -> tuple[list[Table], list[Target]]:
    """From exec to the first token, decode, memory; the probe runs in the same rounds."""
    facts = bundle_facts(bench.bundle("gpt2-4"))
    plain = ("jax_baseline.py", "generate", bench.weights)
    small, large = (
        ("prejit_child.py", "generate", bench.bundle(name)) for name in ("gpt2-4", "gpt2-40")
    )
    floor = (sys.executable, "-c", "import jax; jax.devices(); print('FIRST', flush=True)")
    rows = [
        Row(report.PREJIT, small, bench.prejit),
        Row(report.JAX_COLD, plain),
        Row(report.JAX_WARM, plain, bench.warm),
        Row(report.PROBE, ("bandwidth_child.py", facts["weights"])),
        Row(report.FLOOR, floor),
    ]
    if not bench.quick:
        rows += [
            Row(report.PREJIT_40, large, bench.prejit),
            Row(report.JAX_MAPPED, (*plain, "--mapped"), bench.warm),
            # No cache directory, so no receipt of an earlier verification: the first start of a deployment.
            Row(report.PREJIT_HASHING, small, {"PREJIT_RUNTIME_CACHE": "/dev/null/none"}),
        ]
    samples["startup"] = interleave(rows, bench.runs)
    progress("memory, in processes of their own")
    samples["memory"] = {
        row.name: [run_once(row, poll_memory=True) for _ in range(1 if bench.quick else 3)]
        for row in rows
        if row.name not in (report.PROBE, report.FLOOR)
    }
    return report.startup(samples["startup"], samples["memory"], facts)


def kv_cache(bench: Bench, samples: dict[str, Any]) -> tuple[list[Table], list[Target]]:
    """With and without a KV cache."""
    plain = ("jax_baseline.py", "kv-cache", bench.weights)
    bundle = ("prejit_child.py", "kv-cache", bench.bundle("gpt2-4"))
    rows = [
        Row(report.EAGER, (*plain, "eager")),
        Row(report.JIT, (*plain, "jit")),
        Row(report.JIT_SHORT, (*plain, "jit-short")),
        Row(report.JIT_CACHE, (*plain, "jit-cache")),
        Row(report.PREJIT, bundle, bench.prejit),
    ]
    samples["kv_cache"] = interleave(rows, 1 if bench.quick else bench.runs)
    return report.kv_cache(samples["kv_cache"])


def buckets(bench: Bench, samples: dict[str, Any]) -> tuple[list[Table], list[Target]]:
    """Every program of 40 once. Minutes for each JAX process, so three of them."""
    plain = ("jax_baseline.py", "buckets", bench.weights, "gpt2-40")
    warm = {**bench.warm, "JAX_COMPILATION_CACHE_DIR": str(bench.directory / "jax-cache-40")}
    shutil.rmtree(warm["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
    progress("every bucket once; JAX compiles 40 programs in each cold process")
    rows = [
        Row(report.PREJIT, ("prejit_child.py", "buckets", bench.bundle("gpt2-40")), bench.prejit),
        Row(report.JAX_WARM, plain, warm),
        Row(report.JAX_COLD, plain),
    ]
    samples["buckets"] = interleave(rows, min(bench.runs, 3))
    return report.buckets(samples["buckets"])


def build(bench: Bench, samples: dict[str, Any]) -> tuple[list[Table], list[Target]]:
    """Cold builds, a rebuild that changes nothing, and the least that a command costs."""
    found: dict[str, list[Sample]] = {}
    scratch = bench.directory / "cold"
    if not bench.quick:
        for name, label in (
            ("gpt2-4", report.BUILD_COLD_4),
            ("gpt2-40", report.BUILD_COLD_40),
        ):
            shutil.rmtree(scratch, ignore_errors=True)
            row = bench.build_row(name, label, scratch / "bundles", scratch / "cache")
            found[label] = [run_once(row)]
            progress(f"{label}: {found[label][0]['exit_seconds']:.1f} s")
        shutil.rmtree(scratch, ignore_errors=True)
    name = "gpt2-4" if bench.quick else "gpt2-40"
    label = f"{report.BUILD_NOOP}, {workload.program_count(name)} programs"
    caches = bench.directory / "bundles", bench.directory / "build-cache"
    found |= interleave([bench.build_row(name, label, *caches)], bench.runs)
    small = [
        Row(report.HELP, (PREJIT_COMMAND, "--help")),
        Row(report.PASS, (sys.executable, "-c", "pass")),
    ]
    found |= interleave(small, 3 * bench.runs)
    for processes in found.values():
        for sample in processes:
            if sample["output"].startswith("["):
                sample["compiled"] = json.loads(sample["output"])[0]["compiled"]
    samples["build"] = found
    return report.build(found)


SECTIONS: dict[str, Section] = {
    "startup": startup,
    "kv-cache": kv_cache,
    "buckets": buckets,
    "build": build,
}


def picture(samples: dict[str, Samples], targets: list[Target]) -> str:
    """Start-up and decode as bars."""
    rows = samples["startup"]
    names = [name for name in (report.PREJIT, *report.JAX_ROWS, report.FLOOR) if name in rows]
    probe = spread(rows[report.PROBE], "bytes_per_second").median / workload.decode_bytes()

    def bars(names: list[str], key: str) -> list[tuple[str, Spread, bool]]:
        return [(name, spread(rows[name], key), name == report.PREJIT) for name in names]

    first = chart.Panel(
        "From exec to the first token, seconds (less is better)", bars(names, "first_seconds"), "s"
    )
    decode = chart.Panel(
        "Decode, tokens per second (more is better)",
        bars([name for name in names if name != report.FLOOR], "decode_tokens_per_second"),
        "/s",
        (probe, f"two threads reading the same mapped weights: {probe:.1f} /s"),
    )
    goals = [(f"{t.what}: {t.row()[1]}, wanted {t.row()[2]}", t.met) for t in targets]
    return chart.draw([first, decode], goals)


def write_results(
    directory: Path, facts: dict[str, Any], tables: list[Table], targets: list[Target]
) -> None:
    """Writes samples, page and picture."""
    directory.mkdir(parents=True, exist_ok=True)
    goals = [{**asdict(target), "met": target.met} for target in targets]
    short = re.sub(r"[^a-z0-9]+", "-", facts["machine"]["cpu"].lower()).strip("-")
    short = f"{short[:32]}-{facts['machine']['cores']}"
    (directory / f"{facts['date'][:10]}-{short}.json").write_text(
        json.dumps({**facts, "targets": goals}, separators=(",", ":")) + "\n"
    )
    drawn = "startup" in facts["samples"]
    if drawn:
        (directory / "latest.svg").write_text(picture(facts["samples"], targets))
    page = report.markdown(facts, tables, targets, "latest.svg" if drawn else "")
    (directory / "latest.md").write_text(page)
    print(page)
    progress(f"written to {directory}")


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--runs", type=int, default=7, help="fresh processes of each row (default 7)"
    )
    parser.add_argument("--quick", action="store_true", help="3 runs, main rows only")
    parser.add_argument("--only", choices=SECTIONS, help="one section")
    return parser.parse_args()


def main() -> None:
    """Runs what was asked for."""
    given = options()
    base = os.environ.get("PREJIT_BENCH_DIR") or os.path.expanduser("~/.cache/prejit/bench")
    bench = Bench(Path(base).resolve(), 3 if given.quick else given.runs, given.quick)
    # Two threads everywhere, whatever the machine has. Children inherit it.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    facts: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "runs": bench.runs,
        "machine": machine(),
        "versions": versions(),
        "samples": {},
    }
    sections = [given.only] if given.only else list(SECTIONS)
    if given.quick and not given.only:
        sections.remove("buckets")
    large = not given.quick or "buckets" in sections
    prepare(bench, tuple(workload.BUCKETS) if large else ("gpt2-4",))
    tables: list[Table] = []
    targets: list[Target] = []
    for section in sections:
        progress(section)
        more_tables, more_targets = SECTIONS[section](bench, facts["samples"])
        tables += more_tables
        targets += more_targets
    facts["load_average_after"] = os.getloadavg()[0]
    whole = not (given.quick or given.only)
    write_results(RESULTS if whole else bench.directory / "results", facts, tables, targets)


if __name__ == "__main__":
    main()
