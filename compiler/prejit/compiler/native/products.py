"""Products with a matrix and the forms that compute them. No JAX: a build that changes nothing has none."""

from __future__ import annotations

import re
from dataclasses import dataclass

KERNEL = "kernel"
"""A native kernel of ours."""
DOT = "dot"
"""XLA's dot, of float32."""
WIDENED = "widened dot"
"""XLA's dot after the matrix was converted to float32."""
LOOP = "loop"
"""XLA multiplies and sums in one loop, which converts what it reads."""

_LOOP_ROWS = 32
"""Of more the loop is never the fastest, and may take minutes."""
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}


@dataclass(frozen=True, order=True, slots=True)
class Product:
    """A product with a matrix, by what decides the speed of its forms.

    Attributes:
        dtype: of the matrix.
        rows, inputs, outputs: [rows, inputs] x [inputs, outputs].
        in_out: whether the matrix is stored [inputs, outputs].
    """

    dtype: str
    rows: int
    inputs: int
    outputs: int
    in_out: bool

    @property
    def forms(self) -> tuple[str, ...]:
        """Those that compute it; the last is taken where nothing was measured."""
        if self.dtype == "float32":
            own: tuple[str, ...] = (DOT,)
        else:
            own = (LOOP, WIDENED) if self.rows <= _LOOP_ROWS else (WIDENED,)
        return own if self.in_out else (*own, KERNEL)

    @property
    def matrix_bytes(self) -> int:
        """Of the matrix."""
        return self.inputs * self.outputs * _ITEM_BYTES[self.dtype]

    def __str__(self) -> str:
        order = "in,out" if self.in_out else "out,in"
        return f"{self.dtype} {self.rows} x {self.inputs} x {self.outputs} ({order})"

    @classmethod
    def parse(cls, text: str) -> Product:
        """The inverse of `str`.

        Raises:
            ValueError: the text is not of that form.
        """
        found = re.fullmatch(
            rf"({'|'.join(_ITEM_BYTES)}) ([1-9]\d*) x ([1-9]\d*) x ([1-9]\d*) \((in,out|out,in)\)",
            text,
            re.ASCII,
        )
        if found is None:
            raise ValueError(
                f"expected a product such as 'int8 1 x 768 x 3072 (out,in)', found {text!r:.80}"
            )
        rows, inputs, outputs = map(int, found.group(2, 3, 4))
        return cls(found[1], rows, inputs, outputs, found[5] == "in,out")
