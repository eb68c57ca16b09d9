"""Convolutions of programs that are compiled for a GPU which nobody measured."""

from __future__ import annotations

from collections.abc import Sequence

from prejit.compiler.compile.stablehlo_contents import operations

WITHOUT_CUDNN = (("xla_gpu_experimental_disable_binary_libraries", True),)
"""XLA's flags for a program with them. Compiled without the GPU, it would name cuDNN's algorithm by the
number -1 (xla/backends/gpu/autotuner/cudnn.cc, GetDefaultConfig), which cuDNN 9 refuses when it runs."""


def has_plain_convolutions(
    portable: bytes, platforms: Sequence[str], platform: str, *, tuned: bool
) -> bool:
    """Return whether XLA compiles a program's convolutions to loops of its own, in place of cuDNN's.

    Args:
        portable: StableHLO as a versioned portable artifact.
        platforms: the platforms that it was lowered for, in order.
        platform: the one to compile it for.
        tuned: whether `prejit tune` has measured on such a device.
    """
    # MLIR's bytecode has the names of operations as text. Parsing imports jax, which other builds need not.
    if platform != "cuda" or tuned or b"convolution" not in portable:
        return False
    found = operations(portable, platforms, platform).counts
    return any(name.startswith("stablehlo.convolution ") for name in found)
