"""Compare linear kernels with XLA's products and the memory bandwidth, interleaved in one process.

    python -m benchmarks.studies.kernels [--rows 1,4,16,64,512] [--seconds 0.3]

Prints a row for each shape, dtype and number of rows: GB/s of weights and GFLOP/s of the kernel, of
XLA's best form (weights (out, in) or (in, out)) and, as a limit, of one thread that reads as many bytes
(NumPy's max). Each is the best of its calls, so that a busy machine disturbs little. Calls rotate
through 160 MB of weights, so that each call reads them from memory. A call runs several products one after
another, as a model does, so that threads do not sleep between two products.
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from prejit.compiler.native.library import SOURCES

SHAPES = ((768, 768), (768, 2304), (768, 3072), (3072, 768), (2048, 2048), (2048, 8192))
"""Shapes (inputs, outputs) of products of GPT-2-124M and of a Llama of 1B."""
ROTATED_BYTES = 160 << 20
PRODUCTS = 8
"""Maximum number of products in one program."""


def register_kernel(directory: Path) -> None:
    """Compile the kernels for this machine with g++ and register `linear`."""
    library = directory / "kernels.so"
    flags = ("-std=c++17", "-O3", "-march=native", "-w")
    more = ("-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared", "-pthread")
    sources = (*SOURCES.glob("linear*.cc"), SOURCES / "threads.cc")
    command = ("g++", *flags, *more, "-isystem", jax.ffi.include_dir(), "-o", library, *sources)
    subprocess.run([str(part) for part in command], check=True)
    handler = jax.ffi.pycapsule(ctypes.CDLL(str(library)).prejit_linear)
    jax.ffi.register_ffi_target("linear", handler, platform="cpu")


def kernel(x: jax.Array, w: jax.Array, scale: jax.Array) -> Any:
    """Return x [M, K] times w [N, K] by the kernel."""
    scales = (scale,) if w.dtype == jnp.int8 else ()
    flags = {name: np.int32(0) for name in ("bias", "gated", "residual", "activation")}
    out = jax.ShapeDtypeStruct((x.shape[0], w.shape[0]), np.float32)
    return jax.ffi.ffi_call("linear", out)(x, w, *scales, **flags)


def out_in(x: jax.Array, w: jax.Array, scale: jax.Array) -> Any:
    """Return XLA's dot with weights (out, in), widened first."""
    return jax.lax.dot_general(x, w.astype(x.dtype), (((1,), (1,)), ((), ()))) * scale


def in_out(x: jax.Array, w: jax.Array, scale: jax.Array) -> Any:
    """Return XLA's dot with weights (in, out), widened first."""
    return (x @ w.astype(x.dtype)) * scale


def reduced(x: jax.Array, w: jax.Array, scale: jax.Array) -> Any:
    """Return the product as XLA's multiply and sum."""
    return jnp.sum(x[:, None, :] * w.astype(x.dtype)[None], axis=-1) * scale


def best_seconds(calls: dict[str, Callable[[int], Any]], seconds: float) -> dict[str, float]:
    """Return the least time of each call; all take turns, and each gets the number of the turn."""
    best = dict.fromkeys(calls, float("inf"))
    for call in calls.values():
        call(0)
    end, turn = time.perf_counter() + seconds * len(calls), 0
    while time.perf_counter() < end or turn < 3:
        turn += 1
        for name, call in calls.items():
            begin = time.perf_counter()
            call(turn)
            best[name] = min(best[name], time.perf_counter() - begin)
    return best


def measure(rows: int, inputs: int, outputs: int, dtype: Any, seconds: float) -> str:
    """Return one line of the table."""
    rng = np.random.default_rng(0)
    numbers = rng.integers(-100, 100, (outputs, inputs)).astype(np.int8)
    copies = max(1, ROTATED_BYTES // (numbers.size * np.dtype(dtype).itemsize))
    at_once = min(copies, PRODUCTS)
    weights = [jnp.array(numbers, dtype, copy=True) for _ in range(copies)]
    turned = [jnp.array(numbers.T, dtype, copy=True) for _ in range(copies)]
    x = jnp.asarray(rng.standard_normal((rows, inputs)), jnp.float32)
    scale = jnp.full(outputs, 0.01, jnp.float32)

    def some(among: list[jax.Array], turn: int) -> list[jax.Array]:
        return [among[(turn * at_once + i) % copies] for i in range(at_once)]

    def timed(form: Callable[..., Any], among: list[jax.Array]) -> Callable[[int], Any]:
        def chained(x: jax.Array, some: list[jax.Array], scale: jax.Array) -> Any:
            for w in some:
                y = form(x, w, scale)
                x = x + y[:, :1] * 1e-30
            return y

        compiled = jax.jit(chained).lower(x, some(among, 0), scale).compile()
        return lambda turn: compiled(x, some(among, turn), scale).block_until_ready()

    def read(turn: int) -> None:
        for w in some(weights, turn):
            np.asarray(w).view(np.int64).max()

    calls = {"kernel": timed(kernel, weights), "out_in": timed(out_in, weights), "read": read}
    calls["in_out"] = timed(in_out, turned)
    if rows <= 4:
        calls["reduced"] = timed(reduced, weights)
    best = best_seconds(calls, seconds)
    xla = min((name for name in best if name not in ("kernel", "read")), key=lambda n: best[n])
    gigabytes = weights[0].nbytes * at_once / 1e9
    work = 2e-9 * rows * inputs * outputs * at_once
    return (
        f"{inputs:5} x {outputs:<5} {np.dtype(dtype).name:9} {rows:5} "
        f"{gigabytes / best['kernel']:7.1f} {work / best['kernel']:8.1f} "
        f"{gigabytes / best[xla]:7.1f} {work / best[xla]:8.1f} {xla:8} "
        f"{best[xla] / best['kernel']:6.2f} {gigabytes / best['read']:7.1f}"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="1,4,16,64,512")
    parser.add_argument("--seconds", type=float, default=0.3, help="for each call of a line")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        register_kernel(Path(directory))
    print(
        "   in x out   dtype      rows  kernel GB/s GFLOP/s  XLA GB/s GFLOP/s by  ratio  read GB/s"
    )
    for rows in map(int, arguments.rows.split(",")):
        for inputs, outputs in SHAPES:
            for dtype in (jnp.float32, jnp.bfloat16, jnp.int8):
                print(measure(rows, inputs, outputs, dtype, arguments.seconds), flush=True)


if __name__ == "__main__":
    main()
