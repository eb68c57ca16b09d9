"""Measure what one call of a tiny program costs: jax.jit, `jit` from a bundle, and the calls of a Bundle.

    python -m benchmarks.studies.dispatch [--rounds 15] [--calls 2000]

The ways run in turns. A time is that of many calls in a row and of waiting for the last result, by the
number of calls; each call takes the same arguments, but a bound state takes what the call before returned.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness.fresh_processes import progress
from benchmarks.harness.report import Table
from benchmarks.harness.results import begin, option_parser, publish
from benchmarks.harness.workspace import bench_directory
from prejit.compiler import Program, build, program
from prejit.runtime import jit, load
from prejit.runtime.device import _jit_dispatch

LEAVES = 20


def tanh(x: Any) -> Any:
    """Return the hyperbolic tangent of 128 numbers."""
    return jnp.tanh(x)


def decay(state: Any) -> Any:
    """Return a state of 20 arrays of 256 numbers, each a little smaller."""
    return jax.tree.map(lambda x: x * 0.9, state)


def _state(of: Callable[[Any], Any]) -> tuple[Any, ...]:
    return ({f"layer{n}": of(np.full(256, n, np.float32)) for n in range(LEAVES)},)


PROGRAMS: Mapping[str, tuple[Callable[..., Any], Callable[..., tuple[Any, ...]]]] = {
    "tanh": (tanh, lambda of: (of(np.ones(128, np.float32)),)),
    "decay": (decay, _state),
}
"""Functions, each with a function that makes its arguments of NumPy arrays."""


def ways(name: str, path: Path) -> dict[str, Callable[[], Any]]:
    """Return the ways to call a program, each with its arguments."""
    function, arguments = PROGRAMS[name]
    bundle = load(path, on_mismatch="error")
    on_device, host = arguments(jnp.asarray), arguments(lambda array: array)
    plain, ours = jax.jit(function), jit(function, bundle=bundle, on_miss="error")
    compiled = plain.lower(*on_device).compile()
    # As on a jax without its parts.
    with patch.object(_jit_dispatch.Dispatch, "of", lambda _: None):
        interpreted = jit(function, bundle=bundle, on_miss="error")
    found: dict[str, Callable[[], Any]] = {
        "jax.jit, jax.Array": lambda: plain(*on_device),
        "jit from a bundle, jax.Array": lambda: ours(*on_device),
        "jax.stages.Compiled, jax.Array": lambda: compiled(*on_device),
        "jit from a bundle, each call looked up in Python": lambda: interpreted(*on_device),
        "Bundle.call, jax.Array": lambda: bundle.call(name, *on_device),
        "jax.jit, NumPy": lambda: plain(*host),
        "jit from a bundle, NumPy": lambda: ours(*host),
        "jax.jit, NumPy to NumPy": lambda: jax.tree.map(np.asarray, plain(*host)),
        "Bundle.call, NumPy to NumPy": lambda: bundle.call(name, *host),
        "Bundle.call_async, NumPy to NumPy": lambda: bundle.call_async(name, *host).result(),
    }
    donating, state = jax.jit(function, donate_argnums=0), arguments(jnp.array)

    def donated() -> Any:
        nonlocal state
        state = (donating(*state),)
        return state

    found["jax.jit, the state stays and is donated"] = donated
    for program_name, how in ((name, ""), (f"{name}_donated", " and is donated")):
        found[f"Bundle.bind, the state stays{how}"] = bundle.bind(program_name, *host)
    return found


def seconds_per_call(call: Callable[[], Any], calls: int) -> float:
    """Return how long one of many calls takes."""
    start = time.perf_counter()
    for _ in range(calls):
        result = call()
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / calls


def main() -> None:
    """Build, measure and write."""
    parser = option_parser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=2000)
    given = parser.parse_args()
    programs = [program(f, *arguments(jnp.asarray)) for f, arguments in PROGRAMS.values()]
    for name, (function, arguments) in PROGRAMS.items():
        args = list(arguments(jnp.asarray))
        programs.append(Program(f"{name}_donated", fn=function, args=args, donate=[0]))
    path = build(programs, bench_directory() / "dispatch", name="dispatch", quiet=True).path
    facts = begin(given.rounds, calls=given.calls, seconds_per_call={})
    tables = []
    for name in PROGRAMS:
        called = ways(name, path)
        times: dict[str, list[float]] = {way: [] for way in called}
        for number in range(given.rounds + 1):  # the first one warms up
            progress(f"{name}: round {number} of {given.rounds}")
            for way, call in called.items():
                took = seconds_per_call(call, given.calls)
                times[way] += [took] if number else []
        facts["seconds_per_call"][name] = times
        rows = [
            (way, f"{1e6 * min(taken):.1f}", f"{1e6 * median(taken):.1f}", f"{ratio:.2f}")
            for way, taken in times.items()
            for ratio in [min(taken) / min(times["jax.jit, jax.Array"])]
        ]
        doc = PROGRAMS[name][0].__doc__ or ""
        heads = ("", "least, us", "median, us", "least by that of jax.jit")
        tables.append(Table(f"A call of {name}", heads, rows, doc))
    publish(facts, "dispatch", "Dispatch", tables)


if __name__ == "__main__":
    main()
