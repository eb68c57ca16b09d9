"""Measure loads of recorded executables as XLA serialized them, and without HLO that no load needs.

    prejit record --untraced -o BUNDLE -- python PROGRAM    twice
    python -m benchmarks.studies.lean_loads BUNDLE [--rounds 9]

The loads take turns in one process, with the jax that recorded the programs.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

import jax
from jax._src import compilation_cache

from benchmarks.harness.report import Table
from benchmarks.harness.results import begin, option_parser, publish
from prejit.compiler.compile.worker.lean_executable import lean
from prejit.compiler.recording.jax_cache_packing import read_targets
from prejit.runtime.device._jaxlib import device_list
from prejit.runtime.recorded.hook.jax_texts import OURS_PREFIX


def executables(bundle: Path) -> dict[str, tuple[bytes, bytes]]:
    """Return the executables of a recorded bundle, whole and lean, the largest first."""
    found = {}
    for target in read_targets(bundle):
        for file in target.programs.values():
            if file.entry.file.startswith(OURS_PREFIX):
                continue
            entry = compilation_cache.decompress_executable(file.content())
            whole, _ = compilation_cache.extract_executable_and_time(entry)
            short = lean(whole)
            if short is not None:
                found[file.entry.name] = whole, short
    return dict(sorted(found.items(), key=lambda pair: -len(pair[1][0])))


def seconds_to_load(serialized: bytes) -> float:
    """Return how long XLA takes to load an executable."""
    devices = jax.devices()
    began = time.perf_counter()
    devices[0].client.deserialize_executable(serialized, device_list(devices), None)
    return time.perf_counter() - began


def main() -> None:
    """Measure and write."""
    parser = option_parser()
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--largest", type=int, default=8, help="number of executables in the table")
    given = parser.parse_args()
    facts = begin(given.rounds, seconds={})
    rows = []
    for name, (whole, short) in [*executables(given.bundle).items()][: given.largest]:
        taken = [[seconds_to_load(each) for each in (whole, short)] for _ in range(given.rounds)]
        times = [median(each) for each in zip(*taken, strict=True)]
        facts["seconds"][name] = taken
        kinds = [f"{len(each) / 1e3:,.0f}" for each in (whole, short)]
        ratio = f"{times[1] / times[0]:.2f}"
        rows.append((name, *kinds, *(f"{1e3 * t:.1f}" for t in times), ratio))
    heads = ("", "whole, kB", "lean, kB", "whole, ms", "lean, ms", "lean by whole")
    publish(facts, "lean-loads", "Loads of executables", [Table("Medians", heads, rows, "")])


if __name__ == "__main__":
    main()
