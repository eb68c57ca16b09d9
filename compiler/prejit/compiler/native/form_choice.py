"""Choose the form of each product, from what was measured. No JAX.

A build reads three tables. The first that has a product decides:

    given     `prejit build --forms FILE`: measured elsewhere
    own       `forms.json` in the build cache: measured by builds on this machine
    recorded  `forms.json` beside this module: ships with prejit
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from prejit.compiler.native.form_table import Conditions, FormTable, Measured
from prejit.compiler.native.products import Product

MARGIN = 1.05
"""A form is chosen if it is more than this many times as fast as the default form. Smaller differences are
noise, and a form that differs from program to program costs a lowering and a compile."""
LEAST_BYTES = 1 << 20
"""Minimum size of a matrix that is measured. With a smaller one the call takes as long as the product."""


@dataclass(frozen=True, slots=True)
class FormChoice:
    """The form chosen for a product.

    Attributes:
        product: the product.
        form: one of its forms.
        measured: the measurement that decided, of this product or of the nearest one; None if there is none.
    """

    product: Product
    form: str
    measured: Measured | None


@dataclass(frozen=True)
class KnownForms:
    """The form tables of a build.

    Attributes:
        given: the table of --forms.
        own: the table of the build cache.
        recorded: the table that ships with prejit.
    """

    given: FormTable = field(default_factory=FormTable)
    own: FormTable = field(default_factory=FormTable)
    recorded: FormTable = field(default_factory=FormTable)

    def exact(
        self, product: Product, conditions: Conditions, *, fresh: bool = False
    ) -> Measured | None:
        """Return the measurement of a product, or None.

        Args:
            product: the product.
            conditions: the conditions of this build. An own measurement under other conditions counts only
                in `nearest`.
            fresh: whether to ignore the recorded table.
        """
        at = (conditions.level, product)
        found = self.given.by_jaxlib.get((conditions.level, conditions.jaxlib, product))
        found = (
            found
            or self.given.by_level.get(at)
            or self.own.by_conditions.get((conditions, product))
        )
        return found or (None if fresh else self.recorded.by_level.get(at))

    def missing(
        self, products: Iterable[Product], conditions: Conditions, *, fresh: bool = False
    ) -> tuple[Product, ...]:
        """Return the products that are worth measuring, sorted: large ones, or all if `fresh`."""
        return tuple(
            product
            for product in sorted(set(products))
            if len(product.forms) > 1
            and (fresh or product.matrix_bytes >= LEAST_BYTES)
            and self.exact(product, conditions, fresh=fresh) is None
        )

    def choice(self, product: Product, conditions: Conditions) -> FormChoice:
        """Choose the form of a product by its own measurement, or by that of the nearest product.

        Own measurements of other products are ignored: they are from builds of other models, which must not
        change the programs of this one.
        """
        measured = self.exact(product, conditions) or self.nearest(product, conditions.level)
        form = None if measured is None else fastest_form(measured, product)
        if form is None:
            return FormChoice(product, product.default_form, None)
        return FormChoice(product, form, measured)

    def nearest(self, product: Product, level: str) -> Measured | None:
        """Return the measurement of the most similar product, or None if no matrix has its dtype and order.

        From the own table only measurements of the same product count, under other conditions.
        """
        alike = (
            each
            for table in (self.given, self.own, self.recorded)
            for each in table.by_level.values()
            if (each.product.dtype, each.product.in_out) == (product.dtype, product.in_out)
            and (table is not self.own or each.product == product)
        )
        return min(
            alike,
            key=lambda each: (
                each.conditions.level != level,
                _distance(each.product, product),
                each.product,
                each.conditions.level,
            ),
            default=None,
        )


def fastest_form(measured: Measured, product: Product) -> str | None:
    """Return the form that a measurement suggests for a similar product.

    Returns:
        The fastest form, the default form if that is fast enough, or None if no form of the product was
        measured.
    """
    times = measured.nanoseconds
    known = {form: times[form] for form in product.forms if form in times}
    if not known:
        return None
    fastest, default = min(known, key=known.__getitem__), product.default_form
    if known.get(default, math.inf) <= MARGIN * known[fastest]:
        return default
    return fastest


def _distance(one: Product, other: Product) -> float:
    """Return how different two products are: 1 for each size that is e times the other's."""
    sizes = (
        (one.rows, other.rows),
        (one.inputs, other.inputs),
        (one.outputs, other.outputs),
    )
    return sum(abs(math.log(a / b)) for a, b in sizes)
