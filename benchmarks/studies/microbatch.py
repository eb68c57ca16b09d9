"""Measure what sharing runs gives to many callers: a tiny program, two MLPs and an encoder, one row per call.

    python -m benchmarks.studies.microbatch [--rounds 7] [--seconds 1.0] [--name NAME]

Writes benchmarks/results/NAME.json and .md. In each round the ways take turns, each for some seconds: threads
that call the bundle, and threads that call its engine. The programs have buckets of 1 to 16 rows.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness.measure import Spread, progress
from benchmarks.harness.report import Table
from benchmarks.harness.results import begin, save, use_two_cores
from benchmarks.harness.workspace import RESULTS, Bench, bench_directory
from prejit.compiler import Program, build
from prejit.runtime import Bundle, load
from prejit.server import Engine

THREADS = (1, 16)
BUCKETS = (1, 2, 4, 8, 16)
WIDTHS = {"small": (512, 2048), "large": (2048, 8192)}
"""Width and inner width of the MLPs, whose weights are 8 and 134 MB."""
SENTENCE = "a few short words"

Call = Callable[[], Any]
Samples = dict[str, dict[str, list["Found"]]]


def tiny(x: Any) -> Any:
    """Return the hyperbolic tangent of 128 numbers of each row."""
    return jnp.tanh(x)


def mlp(weights: Any, x: Any) -> Any:
    """Return one layer of a network."""
    return jax.nn.gelu(x @ weights["up"]) @ weights["down"]


def programs(bench: Bench) -> Bundle:
    """Build the programs and load them."""
    random = np.random.default_rng(0)
    how: Any = {"buckets": {"batch": BUCKETS}, "pad": ["batch"]}
    made = [Program("tiny", fn=tiny, args=["float32[{batch}, 128]"], **how)]
    for name, (width, inner) in WIDTHS.items():
        weights = {
            "up": random.standard_normal((width, inner), np.float32) / width**0.5,
            "down": random.standard_normal((inner, width), np.float32) / inner**0.5,
        }
        args = [f"float32[{{batch}}, {width}]"]
        made.append(Program(name, fn=mlp, args=args, params=weights, **how))
    cache = bench.directory / "build-cache"
    built = build(made, bench.directory / "bundles", name="shared", cache=cache, quiet=True)
    return load(built.path, on_mismatch="error")


def encoder(bench: Bench) -> Bundle:
    """Build the encoder of MiniLM's shape and load it."""
    bench.model("minilm")
    shapes = json.dumps([[batch, 16] for batch in BUCKETS])
    manifest = (
        '[bundle]\nname = "shared-encoder"\n\n[model]\nsource = "minilm"\n\n'
        f'[encode]\nshapes = {shapes}\n\n[[target]]\nname = "cpu-host"\n'
    )
    return load(bench.built_manifest("shared-encoder", manifest), on_mismatch="error")


def calls(bench: Bench) -> dict[str, dict[str, Call]]:
    """Return the ways of each call."""
    functions, sentences = programs(bench), encoder(bench)
    sentences.prepare()
    of_functions, of_sentences = Engine(functions), Engine(sentences)
    of_program = {"tiny": ("tanh of 128 numbers", 128)}
    for name, (width, inner) in WIDTHS.items():
        of_program[name] = (f"MLP {width} x {inner} x {width}", width)
    ways: dict[str, dict[str, Call]] = {
        what: {
            "bundle": partial(functions.call, name, np.ones((1, width), np.float32)),
            "engine": partial(of_functions.call, name, np.ones((1, width), np.float32)),
        }
        for name, (what, width) in of_program.items()
    }
    return ways | {
        "encoder of MiniLM's shape, 16 tokens": {
            "bundle": lambda: sentences.encode_batch(SENTENCE),
            "engine": lambda: of_sentences.encode(SENTENCE),
        },
    }


class Found(NamedTuple):
    """The figures that some threads measured together.

    Attributes:
        calls_per_second: how many calls a second they made.
        cpu_seconds: CPU of the process for each call.
    """

    calls_per_second: float
    cpu_seconds: float


def measured(call: Call, threads: int, seconds: float) -> Found:
    """Let some threads call for some seconds."""
    counts = [0] * threads
    begun = threading.Barrier(threads + 1)
    end = [0.0]

    def work(number: int) -> None:
        begun.wait()
        while time.perf_counter() < end[0]:
            call()
            counts[number] += 1

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    end[0] = time.perf_counter() + seconds
    started, cpu = time.perf_counter(), time.process_time()
    begun.wait()
    for worker in workers:
        worker.join()
    took, cpu = time.perf_counter() - started, time.process_time() - cpu
    return Found(sum(counts) / took, cpu / sum(counts))


def measure(ways: dict[str, dict[str, Call]], rounds: int, seconds: float) -> Samples:
    """Return what was measured by call, threads and way: `{"tiny: ...": {"16 bundle": [...]}}`."""
    found: Samples = {name: {} for name in ways}
    for number in range(rounds + 1):
        for name, both in ways.items():
            for threads in THREADS:
                order = list(both.items())
                for way, call in order if number % 2 else order[::-1]:
                    value = measured(call, threads, seconds if number else min(seconds, 0.3))
                    if number:
                        found[name].setdefault(f"{threads} {way}", []).append(value)
        progress(f"round {number}/{rounds}" if number else "warm-up")
    return found


def table(found: Samples) -> Table:
    """Return medians, least and greatest, and the median of the ratios within each round."""
    rows = []
    for name, samples in found.items():
        for threads in THREADS:
            alone, shared = samples[f"{threads} bundle"], samples[f"{threads} engine"]
            pairs = list(zip(alone, shared, strict=True))
            ratio = float(np.median([b.calls_per_second / a.calls_per_second for a, b in pairs]))
            cells = [_rate(each) for each in (alone, shared)]
            costs = [_cpu(each) for each in (alone, shared)]
            rows.append((name, str(threads), *cells, f"{ratio:.2f}", *costs))
    return Table(
        "One row a call",
        (
            *("call", "threads", "`Bundle`, calls/s", "`Engine`, calls/s", "ratio"),
            *("`Bundle`, CPU us/call", "`Engine`, CPU us/call"),
        ),
        rows,
        "Medians, with the least and the greatest of the rounds. The ratio is the median of those within "
        "each round.",
    )


def _rate(values: list[Found]) -> str:
    spread = Spread.of([each.calls_per_second for each in values])
    return f"{spread.median:,.0f} [{spread.low:,.0f}..{spread.high:,.0f}]"


def _cpu(values: list[Found]) -> str:
    spread = Spread.of([each.cpu_seconds * 1e6 for each in values])
    return f"{spread.median:,.0f} [{spread.low:,.0f}..{spread.high:,.0f}]"


def main() -> None:
    """Parse the command line, measure, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each way in each round")
    parser.add_argument("--name", default=f"{time.strftime('%Y-%m-%d')}-microbatch")
    given = parser.parse_args()
    use_two_cores()
    bench = Bench(bench_directory(), given.rounds, False)
    bench.directory.mkdir(parents=True, exist_ok=True)
    facts = begin(given.rounds)
    samples = measure(calls(bench), given.rounds, given.seconds)
    facts |= {"samples": samples, "load_average_after": os.getloadavg()[0]}
    on = facts["machine"]
    head = (
        f"# Shared runs\n\n{facts['date']}, {on['cpu']}, {on['cores']} cores. {given.rounds} rounds in "
        f"turns, on a machine with a load of {on['load_average']:.1f} before and "
        f"{facts['load_average_after']:.1f} after. `python -m benchmarks.studies.microbatch` repeats it.\n\n"
    )
    save(RESULTS, given.name, facts, head + table(samples).markdown())


if __name__ == "__main__":
    main()
