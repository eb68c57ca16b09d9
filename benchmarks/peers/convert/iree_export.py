"""Compile the programs of the JAX baseline with IREE for this machine's CPU.

    peers/convert/iree_export.py IREE_COMPILE OUTPUT

Writes OUTPUT/prefill.vmfb and decode.vmfb (32 tokens in, 64 out) and prefill512.vmfb. They take weights in
the order of their names, then what the baseline's functions take; the cache's arrays in turn.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.harness import workload
from benchmarks.peers import jax_baseline

OPTIONS = (
    "--iree-input-type=stablehlo",
    "--iree-hal-target-device=local",
    "--iree-hal-local-target-device-backends=llvm-cpu",
    "--iree-llvmcpu-target-cpu=host",
    "--iree-opt-level=O3",
    # A prompt of 512 tokens wants 120 KB of stack; the default is 32.
    "--iree-llvmcpu-stack-allocation-limit=262144",
)


def weights() -> dict[str, jax.ShapeDtypeStruct]:
    """Return the avals of the baseline's weights by name."""
    width = workload.WIDTH
    shapes: dict[str, tuple[int, ...]] = {
        "wte.weight": (workload.VOCABULARY, width),
        "wpe.weight": (workload.POSITIONS, width),
        "ln_f.weight": (width,),
        "ln_f.bias": (width,),
    }
    matrices = {
        "attn.c_attn": (3, 1),
        "attn.c_proj": (1, 1),
        "mlp.c_fc": (4, 1),
        "mlp.c_proj": (1, 4),
    }
    for layer in range(workload.LAYERS):
        for name, (outputs, inputs) in matrices.items():
            shapes[f"h.{layer}.{name}.weight"] = (outputs * width, inputs * width)
            shapes[f"h.{layer}.{name}.bias"] = (outputs * width,)
        for name in ("ln_1", "ln_2"):
            shapes |= {f"h.{layer}.{name}.{part}": (width,) for part in ("weight", "bias")}
    return {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in shapes.items()}


def lowered(function: Any, *arguments: Any) -> str:
    """Return the StableHLO of a jitted function that keeps unused arguments."""
    unjitted = function.__wrapped__
    return str(jax.jit(unjitted, keep_unused=True).lower(*arguments).compiler_ir("stablehlo"))


def main(compiler: str, output: Path) -> None:
    """Write to a temporary path and rename it when it is complete."""
    partial = output.with_name(output.name + ".partial")
    partial.mkdir(parents=True, exist_ok=True)

    def tokens(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, np.int32)

    def cache(context: int) -> Any:
        return jax.eval_shape(lambda: jax_baseline.empty_cache(1, context))

    short, long = workload.CONTEXT, 2 * workload.PREFILL_TOKENS
    programs = {
        "prefill": (jax_baseline.prefill, tokens(1, workload.PROMPT_TOKENS), cache(short)),
        "decode": (jax_baseline.decode, tokens(1), tokens(), cache(short)),
        "prefill512": (jax_baseline.prefill, tokens(1, workload.PREFILL_TOKENS), cache(long)),
    }
    for name, (function, *arguments) in programs.items():
        source = partial / f"{name}.mlir"
        source.write_text(lowered(function, weights(), *arguments))
        made = str(partial / f"{name}.vmfb")
        subprocess.run([compiler, str(source), *OPTIONS, "-o", made], check=True)
        source.unlink()
    partial.rename(output)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
