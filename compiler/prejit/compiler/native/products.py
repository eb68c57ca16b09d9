"""Matrix products of a program, the forms that can compute each, and the names that call kernels. No JAX.

A *product* is a matrix product of a program, described by what decides its speed. A *form* is one way to
compute it. The *default form* is used where nothing was measured.

XLA finds a kernel by a name that ends in the digest of its library. Lowering writes PLACEHOLDER there, so
that one program serves the libraries of all levels; the worker that compiles it inserts the digest.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from prejit.compiler.base.stored_dtypes import STORED_DTYPES
from prejit.runtime.format.names import kernel_target

KERNEL = "kernel"
"""The form that calls the native kernel `linear`."""
INTEGERS = "integers"
"""The form that calls the native kernel `linear_integers`, which rounds x to int8."""
KERNEL_OF = {KERNEL: "linear", INTEGERS: "linear_integers"}
"""The kernels of forms that call one."""
DOT = "dot"
"""The form that is XLA's dot of a float32 matrix."""
WIDENED = "widened dot"
"""The form that converts the matrix to float32, then computes XLA's dot."""
LOOP = "loop"
"""The form that multiplies and sums in one loop of XLA's, which converts the matrix while it reads."""

_LOOP_ROWS = 32
"""Maximum rows for LOOP. With more rows it is never the fastest, and may take minutes."""
_WIDENED_BYTES = 1 << 28
"""Maximum size of a float32 copy of a matrix that is worth a trial. Beside LOOP, a larger one takes up to a
hundred times as long as the kernel."""


@dataclass(frozen=True, order=True, slots=True)
class Product:
    """A matrix product: [rows, inputs] x [inputs, outputs].

    `rounds_rows` says that x may be rounded to int8, beside an int8 matrix of a model that we know.
    """

    dtype: str
    rows: int
    inputs: int
    outputs: int
    in_out: bool
    rounds_rows: bool = False

    @property
    def forms(self) -> tuple[str, ...]:
        """The forms that can compute it; the last one is the default."""
        # A token's numbers must not depend on how many rows share its product: these have one form.
        if STORED_DTYPES[self.dtype].words is not None:
            return (KERNEL,)
        if self.dtype == "int8" and not self.in_out:
            return (INTEGERS,) if self.rounds_rows else (KERNEL,)
        if not STORED_DTYPES[self.dtype].is_narrow:
            xla: tuple[str, ...] = (DOT,)
        else:
            xla = (LOOP, WIDENED) if self.rows <= _LOOP_ROWS else (WIDENED,)
        return xla if self.in_out else (*xla, KERNEL)

    @property
    def measured_forms(self) -> tuple[str, ...]:
        """The forms that may be the fastest: they are compiled and run on this machine, if it measures."""
        is_large = 4 * self.inputs * self.outputs > _WIDENED_BYTES and LOOP in self.forms
        return tuple(form for form in self.forms if not (is_large and form == WIDENED))

    @property
    def default_form(self) -> str:
        """The form to use where nothing was measured."""
        return self.forms[-1]

    @property
    def matrix_bytes(self) -> int:
        """The size of the matrix."""
        return self.inputs * self.outputs * STORED_DTYPES[self.dtype].bits // 8

    def __str__(self) -> str:
        order = "in,out" if self.in_out else "out,in"
        return f"{self.dtype} {self.rows} x {self.inputs} x {self.outputs} ({order})"

    @classmethod
    def parse(cls, text: str) -> Product:
        """Return the product that `str` describes with this text.

        Raises:
            ValueError: the text describes no product.
        """
        found = re.fullmatch(
            rf"({'|'.join(STORED_DTYPES)}) ([1-9]\d*) x ([1-9]\d*) x ([1-9]\d*) \((in,out|out,in)\)",
            text,
            re.ASCII,
        )
        if found is None:
            raise ValueError(
                f"expected a product such as 'int8 1 x 768 x 3072 (out,in)', found {text!r:.80}"
            )
        rows, inputs, outputs = map(int, found.group(2, 3, 4))
        return cls(found[1], rows, inputs, outputs, found[5] == "in,out")


PLACEHOLDER = "sha256:" + "0" * 64
KERNELS = (
    *KERNEL_OF.values(),
    *("experts", "attention", "encoder_attention", "norm", "row_adapters", "choose"),
)
"""Names of the kernels; each is exported as `prejit_NAME`."""
KERNEL_CALLS = {kernel: kernel_target(kernel, PLACEHOLDER) for kernel in KERNELS}
"""The name that lowering writes for each kernel."""

_CALLED = re.compile("|".join(map(re.escape, KERNEL_CALLS.values())).encode())


def called(program: bytes) -> bool:
    """Return whether a lowered program calls a kernel."""
    return _CALLED.search(program) is not None


def with_library(program: bytes, digest: str) -> bytes:
    """Return a lowered program with its calls bound to the library of this digest.

    Names keep their lengths, which MLIR's bytecode stores (mlir/docs/BytecodeFormat.md, string section).
    """
    for kernel, name in KERNEL_CALLS.items():
        program = program.replace(name.encode(), kernel_target(kernel, digest).encode())
    return program
