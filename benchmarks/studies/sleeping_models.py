"""Measure how long a sleeping model takes to its first token, and how much memory it gives back.

    python -m benchmarks.studies.sleeping_models [--rounds 10]

An engine of the demo model, and one of GPT-2 124M in float32, each in a process of its own. In turns: a
request to the engine that is awake, a sleep, a request that wakes it, a sleep, and `Engine.wake` with a
request after it. Prompts are new in every round. Memory is what the process holds beside mapped files
(RssAnon of proc(5)), before the first request, and at its median when the engine is awake and asleep.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from benchmarks.harness.fresh_processes import BENCHMARKS, progress
from benchmarks.harness.report import Table
from benchmarks.harness.results import begin, option_parser, publish, use_two_cores
from benchmarks.harness.workload import Sizes
from benchmarks.harness.workspace import Bench, bench_directory
from prejit.runtime import load
from prejit.server import Engine

PROMPT, TOKENS = 32, 8
DEMO: Sizes = {"batch": (1, 4), "prompt": (16, 64), "context": (128, 512)}
GPT2: Sizes = {"batch": (1, 4), "prompt": (32, 128), "context": (256, 1024)}
TIMES = ("awake", "asleep", "woken", "wake", "sleep")
"""First tokens of an engine that was awake, asleep, and woken before; the wake alone; the sleep."""


def own_bytes() -> int:
    """Return the memory of this process that is no file."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon"))


def measure(path: str, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each of TIMES, and bytes at the start, awake and asleep."""
    bundle = load(path, on_mismatch="error")
    bundle.finish()
    engine = Engine(bundle)
    size = bundle.decoder.decoder.vocab_size
    found: dict[str, list[float]] = {"start_bytes": [own_bytes()]}
    prompts = 0

    def note(name: str, value: float) -> None:
        found.setdefault(name, []).append(value)

    def timed(name: str, work: Callable[[], Any]) -> None:
        started = time.perf_counter()
        work()
        note(name, time.perf_counter() - started)

    def request(name: str) -> None:
        nonlocal prompts
        prompts += 1
        prompt = [(31 * prompts + 7 * place + 1) % size for place in range(PROMPT)]
        with engine.stream(prompt, max_new_tokens=TOKENS, stop_token_ids=()) as stream:
            timed(name, lambda: next(stream))
            list(stream)

    def sleep() -> None:
        note("awake_bytes", own_bytes())
        timed("sleep", engine.sleep)
        assert engine.sleeper.is_sleeping
        note("asleep_bytes", own_bytes())

    for _ in range(rounds + 1):
        request("awake")
        sleep()
        request("asleep")
        sleep()
        timed("wake", engine.wake)
        request("woken")
    bundle.close()
    first = ("start_bytes",)
    return {name: values if name in first else values[1:] for name, values in found.items()}


def main() -> None:
    """Build, measure and write."""
    parser = option_parser()
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--child", metavar="BUNDLE", help="measure this bundle, and print JSON")
    given = parser.parse_args()
    use_two_cores()
    if given.child:
        print(json.dumps(measure(given.child, given.rounds)))
        return
    bench = Bench(bench_directory(), given.rounds, quick=False)
    facts = begin(given.rounds)
    demo = (BENCHMARKS.parent / "manifests/demo-model").as_posix()
    manifest = "".join(
        [
            f'[bundle]\nname = "sleep-demo"\n[model]\nsource = "{demo}"\ndtype = "float32"\n[generate]\n',
            *(f"{name} = {list(sizes)}\n" for name, sizes in DEMO.items()),
            '[[target]]\nname = "cpu-host"\n',
        ]
    )
    bundles = {
        "demo, 1.8 million": bench.built_manifest("sleep-demo", manifest),
        "GPT-2, 124 million": bench.built("sleep-gpt2", "gpt2", "float32", GPT2),
    }
    samples: dict[str, dict[str, list[float]]] = {}
    for title, path in bundles.items():
        progress(f"{title}: {given.rounds} rounds")
        command = (sys.executable, "-m", "benchmarks.studies.sleeping_models", "--child", path)
        done = subprocess.run(
            [*command, "--rounds", str(given.rounds)], stdout=subprocess.PIPE, check=True
        )
        samples[title] = json.loads(done.stdout)
    facts |= {"samples": samples}
    times = [
        (title, *(f"{1e3 * median(found[name]):.1f}" for name in TIMES))
        for title, found in samples.items()
    ]
    memory = [
        (
            title,
            *(
                f"{median(found[f'{name}_bytes']) / 1e6:.0f}"
                for name in ("start", "awake", "asleep")
            ),
        )
        for title, found in samples.items()
    ]
    heads = ("", "awake", "asleep", "woken before", "`wake` itself", "`sleep` itself")
    tables = [
        Table(
            "First token, ms", heads, times, f"Prompts of {PROMPT} tokens, one request at a time."
        ),
        Table(
            "Memory beside files, MB", ("", "before the first request", "awake", "asleep"), memory
        ),
    ]
    publish(facts, "sleeping-models", "Models that sleep and wake", tables)


if __name__ == "__main__":
    main()
