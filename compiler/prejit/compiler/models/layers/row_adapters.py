"""Adapters beside the weights: each row of a batch adds the low-rank change of its own one (LoRA).

A matrix of many layers has one pair of stacks, A [slots, L, rank, in] and B [slots, L, rank, out]. The result
is y + x A^T B: B is PEFT's, transposed, times the factor of the adapter. Slot 0 stands for no adapter and is
in no stack: such a row takes the numbers that it has without adapters, bit for bit, and reads nothing.

LoRA: Hu et al. 2021, arXiv 2106.09685. Each row its own: Punica, Chen et al. 2023, arXiv 2310.18547.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from prejit.compiler.models.layers import kernel_calls
from prejit.runtime.format.arrays import Array


@dataclass(frozen=True)
class StackPlace:
    """The place of a matrix: the name of its pair of stacks, and its number among the layers."""

    stack: str
    layer: int


@dataclass(frozen=True)
class Stack:
    """The matrices of one name.

    Attributes:
        name: their name inside of a layer: `self_attn.q_proj`.
        inputs, outputs: the sizes of each.
        modules: their published names, as adapters have them, in the order of the layers.
    """

    name: str
    inputs: int
    outputs: int
    modules: tuple[str, ...]


@dataclass(frozen=True)
class AdapterStacks:
    """The room for adapters of a model."""

    slots: int
    rank: int
    stacks: tuple[Stack, ...]

    @property
    def arrays(self) -> tuple[Array, ...]:
        """The stacks as arguments of programs. Their paths go on with the names of the matrices."""
        found = []
        for each in self.stacks:
            sizes = (self.slots, len(each.modules))
            shapes = ((self.rank, each.inputs), (self.rank, each.outputs))
            for end, shape in zip("AB", shapes, strict=True):
                path = (f"{each.name}.{end}", *each.modules)
                found.append(Array(path, "float32", (*sizes, *shape)))
        return tuple(found)


@dataclass(frozen=True)
class RowAdapters:
    """The adapters of the rows of the program that is traced now.

    Attributes:
        slots: int32 [B], 0 for a row without one.
        stacks: the stacks, by the first part of the path of `AdapterStacks.arrays`.
    """

    slots: jax.Array
    stacks: Mapping[str, jax.Array]


_ROWS: ContextVar[RowAdapters | None] = ContextVar("row_adapters", default=None)


def adapting(rows: RowAdapters | None) -> AbstractContextManager[Any]:
    """Trace models whose rows have adapters inside the block."""
    return kernel_calls.while_tracing(_ROWS, rows)


def are_changed(*places: StackPlace | None) -> bool:
    """Return whether adapters may change one of these matrices in the program that is traced now."""
    return _ROWS.get() is not None and any(place is not None for place in places)


def changed(
    x: jax.Array, y: jax.Array, place: StackPlace | None, activation: str | None = None
) -> jax.Array:
    """Return y [B, T, out] plus the change of each row's adapter, for x [B, T, in].

    In a program with kernels the result goes through an activation that the kernel has, or None. Without them
    rows follow one another on a CPU, so that the numbers of a row do not depend on the others: a product over
    gathered matrices reads and writes a copy of them there. Elsewhere a conditional would split what a step
    launches.
    """
    rows = _ROWS.get()
    if rows is None or place is None:
        return y
    slots, layer = rows.slots, place.layer
    down, up = (rows.stacks[f"{place.stack}.{end}"] for end in "AB")
    if kernel_calls.has_kernels():
        return kernel_calls.row_adapters(x, y, slots, down, up, layer=layer, activation=activation)

    def matrix(stack: jax.Array, slot: jax.Array) -> jax.Array:
        size = (1, 1, *stack.shape[2:])
        return lax.dynamic_slice(stack, (slot - 1, layer, 0, 0), size)[0, 0]

    def row(index: jax.Array, y: jax.Array) -> jax.Array:
        slot = slots[index]

        def add(y: jax.Array) -> jax.Array:
            inner = x[index] @ matrix(down, slot).T
            return y.at[index].add(inner @ matrix(up, slot))

        return lax.cond(slot > 0, add, lambda y: y, y)

    def by_row(y: jax.Array) -> jax.Array:
        return lax.fori_loop(0, len(y), row, y)

    def gathered(y: jax.Array) -> jax.Array:
        taken = jnp.maximum(slots - 1, 0)
        inner = jnp.einsum("bti,bri->btr", x, down[taken, layer])
        change = jnp.einsum("btr,bro->bto", inner, up[taken, layer])
        return jnp.where(slots[:, None, None] > 0, y + change, y)

    return lax.platform_dependent(y, cpu=by_row, default=gathered)
