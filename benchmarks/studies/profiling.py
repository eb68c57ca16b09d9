"""Measure what a recording of `prejit profile` costs while it runs, and that it costs nothing afterwards.

    python -m benchmarks.studies.profiling [--rounds 10]

One and four callers ask an engine of GPT-2 124M (float32) for 64 tokens each: without a recording, and with
one, in turns that change their order, in one process after a round that does not count.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from statistics import median

from benchmarks.harness.fresh_processes import progress
from benchmarks.harness.report import Table
from benchmarks.harness.results import begin, option_parser, publish, use_two_cores
from benchmarks.harness.workload import Sizes
from benchmarks.harness.workspace import Bench, bench_directory
from benchmarks.studies.many_callers import PROMPT, TOKENS, prompt_of
from prejit.runtime import load
from prejit.server import Engine
from prejit.server.telemetry.engine_profile import read_recording, record
from prejit.server.telemetry.profile_time_line import read_time_line

GPT2: Sizes = {"batch": (1, 4), "prompt": (32,), "context": (128,)}
CALLERS = (1, 4)


def measure(path: str, rounds: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Return tokens a second with and without a recording by the number of callers, and its size."""
    bundle = load(path, on_mismatch="error")
    bundle.prepare()
    engine = Engine(bundle, prefix_memory=0)
    numbers = itertools.count()
    found: dict[str, list[float]] = {}

    def ask(callers: int) -> float:
        started = time.perf_counter()
        prompts = [prompt_of(next(numbers), PROMPT, 50257) for _ in range(callers)]
        waiting = [
            engine.submit(each, max_new_tokens=TOKENS, stop_token_ids=()) for each in prompts
        ]
        for each in waiting:
            each.result()
        return callers * TOKENS / (time.perf_counter() - started)

    def recorded(callers: int) -> float:
        rates: list[float] = []
        recording.append(record([("gpt2", bundle, engine)], lambda: rates.append(ask(callers))))
        return rates[0]

    recording: list[bytes] = []
    ways: dict[str, Callable[[int], float]] = {"without": ask, "with": recorded}
    for number in range(rounds + 1):
        for callers in CALLERS:
            for way in sorted(ways, reverse=bool(number % 2)):
                progress(f"round {number} of {rounds}: {callers} callers, {way} a recording")
                rate = ways[way](callers)
                if number:
                    found.setdefault(f"{way} {callers}", []).append(rate)
    engine.close()
    started = time.perf_counter()
    kernels = sum(
        part.group == "kernels" for part in read_time_line(*read_recording(recording[-1])).parts
    )
    size = {"bytes": len(recording[-1]), "kernels": kernels}
    return found, size | {"read_seconds": time.perf_counter() - started}


def main() -> None:
    """Build, measure and write."""
    parser = option_parser()
    parser.add_argument("--rounds", type=int, default=10)
    given = parser.parse_args()
    use_two_cores()
    bench = Bench(bench_directory(), given.rounds, quick=False)
    facts = begin(given.rounds)
    rates, size = measure(bench.built("profile-gpt2", "gpt2", "float32", GPT2), given.rounds)
    facts |= {"tokens_per_second": rates, "recording": size}
    rows = []
    for callers in CALLERS:
        without, recorded = rates[f"without {callers}"], rates[f"with {callers}"]
        ratios = [b / a for a, b in zip(without, recorded, strict=True)]
        cost = f"{1 - median(ratios):.1%}"
        rows.append((str(callers), f"{median(without):.1f}", f"{median(recorded):.1f}", cost))
    about = (
        f"GPT-2 124M float32, prompts of {PROMPT}, {TOKENS} new tokens each, medians of {given.rounds} "
        f"rounds; the cost is the median of the rounds' own ratios. A recording of {CALLERS[-1]} callers "
        f"has {size['kernels']:,} kernels in {size['bytes'] / 1e6:.1f} MB, which take the client "
        f"{size['read_seconds']:.1f} s to read."
    )
    heads = ("callers", "tokens/s without", "tokens/s with", "cost")
    publish(facts, "profile", "Profiling", [Table("The cost of a recording", heads, rows, about)])


if __name__ == "__main__":
    main()
