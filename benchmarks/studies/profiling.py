"""Measure what a recording of `prejit profile` costs while it runs.

    python -m benchmarks.studies.profiling [--rounds 20]

A stream of GPT-2 124M (float32) gives tokens without a recording and with one, in turns that change their
order, in one process after two rounds that do not count. The time between tokens counts, and CPU time, which
other work on the machine disturbs less.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from benchmarks.harness.fresh_processes import progress
from benchmarks.harness.report import Table
from benchmarks.harness.results import begin, option_parser, publish, use_two_cores
from benchmarks.harness.workload import Sizes
from benchmarks.harness.workspace import Bench, bench_directory
from benchmarks.studies.many_callers import PROMPT, prompt_of
from prejit.runtime import load
from prejit.server import Engine
from prejit.server.telemetry.engine_profile import read_recording, record
from prejit.server.telemetry.profile_time_line import read_time_line

GPT2: Sizes = {"batch": (1, 4), "prompt": (32,), "context": (128,)}
TOKENS = 32

Samples = dict[str, list[float]]
"""Milliseconds by way (`without`, `with`) and what they are (`token`, `cpu`)."""


def measure(path: str, rounds: int) -> tuple[Samples, dict[str, float]]:
    """Return the time between tokens, and the CPU time of a token, of each way; and a recording's size."""
    bundle = load(path, on_mismatch="error")
    bundle.prepare()
    engine = Engine(bundle, prefix_memory=0)
    numbers = itertools.count()
    found: Samples = {}

    def stream(way: str) -> None:
        asked: dict[str, Any] = {"max_new_tokens": TOKENS, "stop_token_ids": ()}
        started, times = time.process_time(), []
        for _ in engine.stream(prompt_of(next(numbers), PROMPT, 50257), **asked):
            times.append(time.perf_counter())
        cpu = (time.process_time() - started) / TOKENS
        found.setdefault(f"{way} cpu", []).append(1e3 * cpu)
        gaps = [1e3 * (after - before) for before, after in itertools.pairwise(times)]
        found.setdefault(f"{way} token", []).extend(gaps)

    recordings: list[bytes] = []

    def recorded(way: str) -> None:
        each = [("gpt2", bundle, engine)]
        recordings.append(record(each, lambda: stream(way)))

    ways: dict[str, Callable[[str], None]] = {"without": stream, "with": recorded}
    for number in range(rounds + 2):
        progress(f"round {number} of {rounds + 1}")
        if number == 2:
            found.clear()
        for way in sorted(ways, reverse=bool(number % 2)):
            ways[way](way)
    engine.close()
    started = time.perf_counter()
    parts = read_time_line(*read_recording(recordings[-1])).parts
    kernels = sum(part.group == "kernels" for part in parts)
    seconds = time.perf_counter() - started
    return found, {"bytes": len(recordings[-1]), "kernels": kernels, "read_seconds": seconds}


def main() -> None:
    """Build, measure and write."""
    parser = option_parser()
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    use_two_cores()
    bench = Bench(bench_directory(), given.rounds, quick=False)
    facts = begin(given.rounds)
    samples, size = measure(bench.built("profile-gpt2", "gpt2", "float32", GPT2), given.rounds)
    facts |= {"milliseconds": samples, "recording": size}
    rows = []
    for key, what in (("token", "time between tokens"), ("cpu", "CPU time of a token")):
        without, recorded = (median(samples[f"{way} {key}"]) for way in ("without", "with"))
        cost = f"{recorded / without - 1:.1%}"
        rows.append((what, f"{without:.2f}", f"{recorded:.2f}", cost))
    about = (
        f"Medians in milliseconds. GPT-2 124M float32, one stream, prompts of {PROMPT}, {TOKENS} new tokens. "
        f"A recording of them has {size['kernels']:,} kernels in {size['bytes'] / 1e6:.2f} MB, which take "
        f"the client {size['read_seconds']:.2f} s to read."
    )
    heads = ("", "without", "with", "cost")
    tables = [Table("The cost of a recording", heads, rows, about)]
    publish(facts, "profile", "Profiling", tables)


if __name__ == "__main__":
    main()
