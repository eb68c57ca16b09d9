"""Which form each matrix product of a model gets while the model is traced.

A portable program uses XLA's forms only. For a CPU target with a kernel library, a program is lowered a
second time with calls of native kernels; `using` makes that choice known to the layers. In such a program
every form, XLA's too, rounds x to bfloat16 where the matrix is bfloat16 or int8 (kernels/linear.h), so that
the forms of a product differ in the order of its sums only. A portable program has no kernel to agree with
and does not round x. The layers of an encoder round x to int8 for int8 matrices (kernels/linear_integers.h),
which has no other form.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

from prejit.compiler.native.products import Product


@dataclass(frozen=True)
class Forms:
    """The forms of products for a target with kernels.

    Attributes:
        chosen: the form of each product that does not get its default form.
        met: collects every product that is traced.
    """

    chosen: Mapping[Product, str] = field(default_factory=dict)
    met: set[Product] = field(default_factory=set)

    def form(self, product: Product) -> str:
        """Return the form of a product."""
        return self.chosen.get(product, product.default_form)


_FORMS: ContextVar[Forms | None] = ContextVar("forms", default=None)
_OUT_IN: ContextVar[bool] = ContextVar("out_in", default=False)
_ROUNDS_ROWS: ContextVar[bool] = ContextVar("rounds_rows", default=False)

T = TypeVar("T")


@contextmanager
def while_tracing(variable: ContextVar[Any], value: T) -> Iterator[T]:
    """Give a variable this value inside the block."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


def using(forms: Forms | None) -> AbstractContextManager[Any]:
    """Trace models with these forms and with kernels inside the block; None means XLA's forms only."""
    return while_tracing(_FORMS, forms)


def storing(*, out_in: bool) -> AbstractContextManager[Any]:
    """Store matrices (out, in), as kernels read them, inside the block; otherwise as is fastest for XLA."""
    return while_tracing(_OUT_IN, out_in)


def are_stored_out_in() -> bool:
    """Return whether all matrices are stored (out, in)."""
    return _OUT_IN.get()


def has_kernels() -> bool:
    """Return whether the program that is traced now may call kernels."""
    return _FORMS.get() is not None


def rounding_rows() -> AbstractContextManager[Any]:
    """Let products with int8 matrices round x to int8 inside the block: the layers of an encoder."""
    return while_tracing(_ROUNDS_ROWS, True)


def rounds_rows() -> bool:
    """Return whether products with int8 matrices may round x to int8."""
    return _ROUNDS_ROWS.get()


def form_of(product: Product) -> str | None:
    """Return the form of a product in the program that is traced now.

    None means a portable program, in which `linear.dot` chooses one of XLA's forms.
    """
    forms = _FORMS.get()
    if forms is None:
        return None
    forms.met.add(product)
    return forms.form(product)
