"""The names by which programs call kernels. No JAX.

XLA knows a kernel by a name that ends in the digest of its library. Lowering writes PLACEHOLDER there, so
that one program serves the libraries of all levels of a processor; a worker puts the digest in.
"""

from __future__ import annotations

import re

from prejit.runtime.format.names import kernel_target

PLACEHOLDER = "sha256:" + "0" * 64
KERNELS = ("linear", "attention", "encoder_attention", "norm")
"""In kernels/, each exported as `prejit_NAME`."""
KERNEL_CALLS = {kernel: kernel_target(kernel, PLACEHOLDER) for kernel in KERNELS}
"""What lowering writes for each."""

_CALLED = re.compile("|".join(map(re.escape, KERNEL_CALLS.values())).encode())


def called(program: bytes) -> bool:
    """Whether a program from lowering calls any."""
    return _CALLED.search(program) is not None


def with_library(program: bytes, digest: str) -> bytes:
    """A program from lowering, its calls bound to the library of this digest.

    Names keep their lengths, which MLIR's bytecode holds (mlir/docs/BytecodeFormat.md, string section).
    """
    for kernel, name in KERNEL_CALLS.items():
        program = program.replace(name.encode(), kernel_target(kernel, digest).encode())
    return program
