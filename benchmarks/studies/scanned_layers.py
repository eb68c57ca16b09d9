"""Compare a decoder whose layers are one program run L times (lax.scan) with one whose layers are unrolled.

    python -m benchmarks.studies.scanned_layers             about 3 minutes on two cores
    python -m benchmarks.studies.scanned_layers --small     seconds; writes nothing

A decoder of the size of GPT-2 124M in plain JAX, float32, on the CPU: one decode step for one row, and a
prefill of 32 tokens. Both forms have the same weights and must return the same logits. `scan` reads its
weights from arrays with a leading axis of layers. Each form compiles once in each round; the steps of both
forms take turns. The median of rounds counts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness.measure import progress
from benchmarks.harness.report import Table
from benchmarks.harness.results import begin, save, use_two_cores
from benchmarks.harness.workspace import RESULTS

Layer = dict[str, jax.Array]
FORMS = ("unrolled", "scan")


def weights(layers: int, width: int, seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    """Return the weights of all layers, stacked along their first axis."""
    random = np.random.default_rng(seed)

    def make(*shape: int) -> np.ndarray[Any, Any]:
        return random.standard_normal((layers, *shape), np.float32) * 0.02

    return {
        "qkv": make(width, 3 * width),
        "out": make(width, width),
        "up": make(width, 4 * width),
        "down": make(4 * width, width),
    }


def norm(x: jax.Array) -> jax.Array:
    """Return x [..., D] with mean 0 and variance 1."""
    x = x - x.mean(-1, keepdims=True)
    scaled: jax.Array = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)
    return scaled


def layer(
    of: Layer, x: jax.Array, keys: jax.Array, values: jax.Array, start: jax.Array, heads: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the output of a layer for x [T, D], and its caches [S, H, K] with T new positions."""
    new, width = x.shape
    q, k, v = (
        each.reshape(new, heads, width // heads) for each in jnp.split(norm(x) @ of["qkv"], 3, -1)
    )
    keys = jax.lax.dynamic_update_slice(keys, k, (start, 0, 0))
    values = jax.lax.dynamic_update_slice(values, v, (start, 0, 0))
    scores = jnp.einsum("thk,shk->hts", q, keys) / np.sqrt(width // heads)
    seen = jnp.arange(keys.shape[0])[None] <= start + jnp.arange(new)[:, None]
    attention = jax.nn.softmax(jnp.where(seen, scores, -1e30))
    x = x + jnp.einsum("hts,shk->thk", attention, values).reshape(new, width) @ of["out"]
    return x + jax.nn.gelu(norm(x) @ of["up"]) @ of["down"], keys, values


def unrolled(heads: int) -> Callable[..., Any]:
    """Return the decoder with a copy of the layer's program for each layer."""

    def run(layers: list[Layer], x: Any, cache: list[tuple[Any, Any]], start: Any) -> Any:
        changed = []
        for of, (keys, values) in zip(layers, cache, strict=True):
            x, keys, values = layer(of, x, keys, values, start, heads)
            changed.append((keys, values))
        return norm(x), changed

    return run


def scanned(heads: int) -> Callable[..., Any]:
    """Return the decoder with one program for all layers."""

    def run(layers: Layer, x: Any, cache: tuple[Any, Any], start: Any) -> Any:
        def step(x: Any, of: Any) -> Any:
            mine, keys, values = of
            x, keys, values = layer(mine, x, keys, values, start, heads)
            return x, (keys, values)

        x, changed = jax.lax.scan(step, x, (layers, *cache))
        return norm(x), changed

    return run


def study(
    layers: int, width: int, context: int, new: int, rounds: int, steps: int
) -> dict[str, Any]:
    """Return the milliseconds of compiling and of a step of both forms, one of each for each round."""
    heads = max(1, width // 64)
    stacked = weights(layers, width)
    shape = (context, heads, width // heads)
    apart: Any = [{name: jnp.asarray(w[i]) for name, w in stacked.items()} for i in range(layers)]
    together = {name: jnp.asarray(w) for name, w in stacked.items()}
    x = jnp.asarray(np.random.default_rng(1).standard_normal((new, width), np.float32))
    found: dict[str, Any] = {name: {"compile": [], "step": [], "code": 0} for name in FORMS}
    for _ in range(rounds):
        programs: dict[str, Any] = {}
        caches: dict[str, Any] = {}
        for name in FORMS:
            if name == "unrolled":
                caches[name] = [(jnp.zeros(shape), jnp.zeros(shape)) for _ in range(layers)]
                function, given = unrolled(heads), apart
            else:
                caches[name] = tuple(jnp.zeros((layers, *shape)) for _ in range(2))
                function, given = scanned(heads), together
            lowered = jax.jit(function, donate_argnums=2).lower(given, x, caches[name], 0)
            began = time.perf_counter()
            programs[name] = lowered.compile()
            found[name]["compile"].append(1e3 * (time.perf_counter() - began))
            found[name]["arguments"] = given
        results = {}
        times: dict[str, list[float]] = {name: [] for name in FORMS}
        for step in range(steps):
            for name in FORMS:
                began = time.perf_counter()
                results[name], caches[name] = programs[name](
                    found[name]["arguments"], x, caches[name], np.int32(step % (context - new))
                )
                jax.block_until_ready(results[name])
                times[name].append(1e3 * (time.perf_counter() - began))
        for name in FORMS:
            found[name]["step"].append(statistics.median(times[name]))
        difference = float(jnp.abs(results["unrolled"] - results["scan"]).max())
        assert difference < 1e-2, f"the forms disagree by {difference}"
    return {name: {key: found[name][key] for key in ("compile", "step")} for name in FORMS}


def main() -> None:
    """Measure, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a small decoder; write nothing")
    small = parser.parse_args().small
    use_two_cores()
    layers, width, context, rounds, steps = (3, 128, 64, 1, 5) if small else (12, 768, 256, 5, 40)
    facts = begin(rounds, layers=layers, width=width, context=context)
    rows, found = [], {}
    for what, new in (("decode, 1 token", 1), ("prefill, 32 tokens", 32)):
        progress(what)
        found[what] = study(layers, width, context, new, rounds, steps)
        medians = {
            (name, key): statistics.median(found[what][name][key])
            for name in FORMS
            for key in ("compile", "step")
        }
        for name in FORMS:
            ratio = medians[name, "step"] / medians["unrolled", "step"]
            rows.append(
                (
                    *(what, name, f"{medians[name, 'compile']:.0f}"),
                    *(f"{medians[name, 'step']:.2f}", f"{ratio:.2f}"),
                )
            )
    head = ("program", "layers", "compile ms", "run ms", "run, of unrolled")
    note = (
        f"{layers} layers, width {width}, {context} positions, float32; medians of {rounds} rounds."
    )
    page = f"# Layers as one program\n\n{Table('Forms', head, rows, note).markdown()}"
    if small:
        print(page)
        return
    save(RESULTS, f"{facts['date'][:10]}-scanned-layers", {**facts, "forms": found}, page)


if __name__ == "__main__":
    main()
