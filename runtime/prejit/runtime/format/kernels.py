"""The names and levels of native kernels in a bundle."""

from __future__ import annotations

_V3 = (
    *("64bit", "avx", "avx2", "bmi", "bmi2", "cmov", "crc32", "cx16", "cx8", "f16c", "fma", "fxsr"),
    *("lzcnt", "mmx", "movbe", "popcnt", "sahf", "sse", "sse2", "sse3", "sse4.1", "sse4.2"),
    *("ssse3", "xsave"),
)
_V4 = (*_V3, "avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl")
KERNEL_LEVELS = {"x86-64-v2": (), "x86-64-v3": _V3, "x86-64-v4": _V4}
"""The levels of x86-64 that native kernels are built for, and the extensions, in LLVM's names, that the
requirement of a target with such kernels must have: those of the catalogue, which `load` has no time to read.
For v2 none: jaxlib's own wheels need AVX, so a machine that comes this far has all of v2."""

KERNEL_PREFIX = "prejit_"
"""Of the names that a library exports its kernels by."""


def kernel_target(kernel: str, library: str) -> str:
    """The name of a custom call that a kernel answers: `prejit_linear.0123456789abcdef`.

    Args:
        kernel: its name, such as `linear`.
        library: digest of the library that holds it.
    """
    return f"{KERNEL_PREFIX}{kernel}.{library.removeprefix('sha256:')[:16]}"
