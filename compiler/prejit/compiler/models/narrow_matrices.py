"""Call a function of float32 matrices with the narrow values that a bundle stores.

The function is traced with float32 matrices, and its jaxpr is evaluated with the stored values in their
place. A product with a matrix becomes `linear.dot` of the stored values, as in prejit's own layers, and the
scales multiply its result, or x. Whatever else the function does with a matrix gets the matrix widened.
`evaluate` runs a jaxpr with a rule for some of its primitives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from prejit.compiler.base.stored_dtypes import STORED_DTYPES
from prejit.compiler.models.layers import kernel_calls, linear
from prejit.compiler.native.products import KERNEL, Product


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NarrowMatrix:
    """A matrix as it is stored, with two or more axes.

    Attributes:
        values: bfloat16, or integers.
        scale: float32, of the shape without the shared axes; None: `values` are the values themselves.
        shared: the axes whose values share a scale.
        order: the axes of `values` in the order of the matrix that the function sees.
        name: its name, for `recording`.
        depth: the number of loops that have sliced it.
    """

    values: jax.Array
    scale: jax.Array | None
    shared: tuple[int, ...] = field(metadata={"static": True})
    order: tuple[int, ...] = field(metadata={"static": True})
    name: str = field(default="", metadata={"static": True})
    depth: int = field(default=0, metadata={"static": True})

    def widened(self) -> jax.Array:
        """Return the matrix in float32."""
        wide = self.values.astype(jnp.float32)
        if self.scale is not None:
            wide *= jnp.expand_dims(self.scale, self.shared)
        return jnp.transpose(wide, self.order)

    @property
    def is_sliceable(self) -> bool:
        """True if it is a stack of matrices, each with scales of its own."""
        return self.values.ndim > 2 and 0 not in self.shared and self.order[0] == 0

    @property
    def of_slices(self) -> NarrowMatrix:
        """Return the matrix again where a loop has sliced its arrays."""
        return replace(
            self,
            shared=tuple(axis - 1 for axis in self.shared),
            order=tuple(axis - 1 for axis in self.order[1:]),
            depth=self.depth + 1,
        )


Uses = dict[str, set[tuple[int, ...] | None]]
"""The operations on matrices, by name, each with the axes that a product sums over; None: no product."""

_USES: ContextVar[Uses | None] = ContextVar("uses", default=None)


def recording() -> AbstractContextManager[Uses]:
    """Record what functions that are called inside the block do with matrices."""
    return kernel_calls.while_tracing(_USES, {})


def _record(matrix: NarrowMatrix, axes: tuple[int, ...] | None) -> None:
    if (uses := _USES.get()) is not None:
        uses.setdefault(matrix.name, set()).add(axes)


def call_narrow(
    function: Callable[..., Any], matrices: Mapping[str, NarrowMatrix], *arguments: Any
) -> Any:
    """Return `function(wide, *arguments)`, where `wide` has the matrices in float32, by name."""
    wide = jax.eval_shape(lambda: {name: each.widened() for name, each in matrices.items()})
    traced, result = jax.make_jaxpr(function, return_shape=True)(wide, *arguments)
    ordered = [matrices[name] for name in sorted(matrices)]
    found = evaluate(traced, [*ordered, *jax.tree.leaves(arguments)], _apply)
    return jax.tree.unflatten(jax.tree.structure(result), map(_wide, found))


def _apply(equation: Any, given: list[Any]) -> Sequence[Any]:
    """Return the results of one operation. Operands and results may be narrow matrices."""
    name, narrow = equation.primitive.name, [isinstance(each, NarrowMatrix) for each in given]
    if any(narrow):
        if name in INLINED:
            return evaluate(called(equation), given, _apply)
        if name == "scan":
            return _scan(equation, given)
        if name == "transpose":
            order = (given[0].order[axis] for axis in equation.params["permutation"])
            return [replace(given[0], order=tuple(order))]
        if name == "dot_general" and narrow.count(True) == 1:
            product = _product(equation, given, narrow.index(True))
            if product is not None:
                return [product]
    return bind(equation, list(map(_wide, given)))


def _product(equation: Any, given: list[Any], place: int) -> jax.Array | None:
    """Return the product with a narrow matrix, [free axes of x, free axes of the matrix] or reversed.

    Returns None for a product that `linear.dot` does not compute: of batches, or where the scales differ
    along some contracted and some other axis, or where axes of the matrix would have to move.
    """
    matrix, x = given[place], given[1 - place]
    sizes = matrix.values.shape
    contracted, batches = equation.params["dimension_numbers"]
    wanted = equation.params["preferred_element_type"]
    if any(batches) or x.dtype != jnp.float32 or wanted not in (None, jnp.float32):
        return None
    pairs = sorted(
        (matrix.order[of_matrix], of_x)
        for of_matrix, of_x in zip(contracted[place], contracted[1 - place], strict=True)
    )
    inner = tuple(axis for axis, _ in pairs)
    outer = tuple(axis for axis in matrix.order if axis not in inner)
    every = tuple(range(len(sizes)))
    straight = every, (*every[len(outer) :], *every[: len(outer)])  # no value has to move
    if not inner or not outer or (*inner, *outer) not in straight:
        return None
    kept = [axis for axis in every if axis not in matrix.shared]
    axes = [axis for _, axis in pairs]
    x = jnp.moveaxis(x, axes, range(x.ndim - len(axes), x.ndim))
    free = x.shape[: x.ndim - len(axes)]
    if matrix.scale is not None and set(kept) <= set(inner):
        of_inner = [sizes[axis] if axis in kept else 1 for axis in inner]
        x *= matrix.scale.reshape(of_inner)
    elif matrix.scale is not None and not set(kept) <= set(outer):
        return None
    inputs, outputs = (math.prod(sizes[axis] for axis in each) for each in (inner, outer))
    in_out = inner[0] < outer[0]
    stored = matrix.values.reshape((inputs, outputs) if in_out else (outputs, inputs))
    is_plain = in_out and matrix.order == every
    _record(matrix, tuple(axis + matrix.depth for axis in inner) if is_plain else None)
    of_outer = [sizes[axis] for axis in outer]
    scale = None
    if matrix.scale is not None and set(kept) <= set(outer):
        scale = matrix.scale.reshape([sizes[axis] if axis in kept else 1 for axis in outer])
        scale = jnp.broadcast_to(scale, of_outer).reshape(outputs)
    rows = free if len(free) in (1, 2) else (-1, *(free[-1:] or (1,)))  # as kernels take them
    y = _multiplied(x.reshape(*rows, inputs), stored, scale, in_out).reshape(*free, *of_outer)
    if place == 0:
        y = jnp.moveaxis(y, range(len(free)), range(y.ndim - len(free), y.ndim))
    return y


def _multiplied(
    x: jax.Array, stored: jax.Array, scale: jax.Array | None, in_out: bool
) -> jax.Array:
    """Return the product of x [..., in] with a matrix as `Linear` computes it: float32 [..., out]."""
    inputs, outputs = stored.shape if in_out else stored.shape[::-1]
    rows = math.prod(x.shape[:-1])
    form = kernel_calls.form_of(Product(str(stored.dtype), rows, inputs, outputs, in_out))
    if form == KERNEL:
        if scale is None and STORED_DTYPES[str(stored.dtype)].has_scales:
            scale = jnp.ones(outputs)
        return kernel_calls.linear(x, kernel_calls.Operand(stored, scale))
    y = linear.dot(x, stored, 0 if in_out else 1, form)
    return y if scale is None else y * scale


def _scan(equation: Any, given: list[Any]) -> Sequence[Any]:
    """Run a loop, such as one over layers. Slices of stacks of narrow matrices stay narrow inside."""
    settings, body = equation.params, called(equation)
    # What a loop slices or stacks has one more axis outside: jax 0.12 has no numbers of them as 0.10 has.
    carried = len(equation.outvars) - _sliced(equation.outvars, body.jaxpr.outvars)
    second = len(given) - _sliced(equation.invars, body.jaxpr.invars)
    first = second - carried
    constants, carry = given[:first], [_wide(each) for each in given[first:second]]
    stacks = [
        each if isinstance(each, NarrowMatrix) and each.is_sliceable else _wide(each)
        for each in given[second:]
    ]

    def step(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
        inside = [each.of_slices if isinstance(each, NarrowMatrix) else each for each in slices]
        found = [_wide(each) for each in evaluate(body, [*constants, *carry, *inside], _apply)]
        return found[: len(carry)], found[len(carry) :]

    last, stacked = lax.scan(
        step,
        carry,
        stacks,
        length=settings["length"],
        reverse=settings["reverse"],
        unroll=settings["unroll"],
    )
    return [*last, *stacked]


def _sliced(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    pairs = zip(outside, inside, strict=True)
    return sum(one.aval.ndim > other.aval.ndim for one, other in pairs)


def _wide(value: Any) -> Any:
    if not isinstance(value, NarrowMatrix):
        return value
    _record(value, None)
    return value.widened()


INLINED = ("jit", "closed_call", "custom_jvp_call", "custom_vjp_call", "remat2")
"""Primitives that call a jaxpr with their own operands."""


def evaluate(
    closed: ClosedJaxpr, arguments: Sequence[Any], apply: Callable[[Any, list[Any]], Sequence[Any]]
) -> list[Any]:
    """Return the results of a jaxpr. `apply` returns those of one operation for its operands.

    A value is dropped when the last operation that takes it is done.
    """
    jaxpr = closed.jaxpr
    known: dict[Any, Any] = dict(
        zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *arguments), strict=True)
    )

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else known[atom]

    last = {
        atom: place for place, each in enumerate(jaxpr.eqns) for atom in _variables(each.invars)
    }
    last |= dict.fromkeys(_variables(jaxpr.outvars), len(jaxpr.eqns))
    for place, equation in enumerate(jaxpr.eqns):
        results = apply(equation, [read(atom) for atom in equation.invars])
        known.update(zip(equation.outvars, results, strict=True))
        for atom in (*_variables(equation.invars), *equation.outvars):
            if last.get(atom, place) == place:
                known.pop(atom, None)
    return [read(atom) for atom in jaxpr.outvars]


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def bind(equation: Any, given: Sequence[Any]) -> Sequence[Any]:
    """Return the results of an operation for arrays."""
    parameters = equation.primitive.get_bind_params(equation.params)
    with equation.ctx.manager:
        results = equation.primitive.bind(*given, **parameters)
    return results if equation.primitive.multiple_results else [results]


def called(equation: Any) -> ClosedJaxpr:
    """Return the jaxpr that an operation of INLINED, or a loop, calls."""
    held = next(each for each in equation.params.values() if isinstance(each, ClosedJaxpr | Jaxpr))
    return held if isinstance(held, ClosedJaxpr) else ClosedJaxpr(held, ())
