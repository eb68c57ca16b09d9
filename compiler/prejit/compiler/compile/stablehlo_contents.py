"""Contents of a portable program: its operations, its text, its arithmetic, and its convolutions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from prejit.runtime.base.files import digest_of
from prejit.runtime.device import _jax_parts
from prejit.runtime.device.portable import stablehlo_module


@dataclass(frozen=True, slots=True)
class Operations:
    """The computation of a program, whatever the version of StableHLO in which it is stored.

    Attributes:
        digest: digest of the program as text, without the places in source files that it came from.
        counts: the number of each operation with the types of its results, such as
            `stablehlo.add tensor<8xf32>`, sorted.
    """

    digest: str
    counts: dict[str, int]


def operations(portable: bytes, platforms: Sequence[str], platform: str) -> Operations:
    """Return the operations of a program.

    Arguments and errors as `stablehlo_module`.
    """
    ir = _jax_parts.import_mlir()
    found: Counter[str] = Counter()

    def note(op: Any) -> Any:
        found[" ".join([op.name, *(str(result.type) for result in op.results)])] += 1
        return ir.WalkResult.ADVANCE

    module = stablehlo_module(portable, platforms, platform).operation
    module.walk(note)
    text = module.get_asm(enable_debug_info=False)
    return Operations(digest_of(text.encode()), dict(sorted(found.items())))


def as_text(portable: bytes, platforms: Sequence[str], platform: str) -> str:
    """Return a program as MLIR's text. Arguments and errors as `stablehlo_module`."""
    return stablehlo_module(portable, platforms, platform).operation.get_asm(
        enable_debug_info=False, large_elements_limit=_SHOWN_ELEMENTS
    )


def count_flops(portable: bytes, platforms: Sequence[str], platform: str) -> float:
    """Return the floating-point operations of a program, by XLA's count before it optimizes anything.

    A loop counts as one turn. Arguments and errors as `stablehlo_module`.
    """
    module = stablehlo_module(portable, platforms, platform)
    return _jax_parts.hlo_cost(module).get("flops", 0.0)


_SHOWN_ELEMENTS = 16
"""Constants with more elements than this are cut in texts of programs."""


WITHOUT_CUDNN = (("xla_gpu_experimental_disable_binary_libraries", True),)
"""XLA's flags for a program with convolutions. Compiled without the GPU, it would name cuDNN's algorithm by
the number -1 (xla/backends/gpu/autotuner/cudnn.cc, GetDefaultConfig), which cuDNN 9 refuses when it runs."""


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
