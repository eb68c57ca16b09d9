"""Matrices of the user's decoders in bfloat16 or int8.

The model's code does not change: it is traced with float32 matrices, as it was written for.
narrow_matrices.py puts the stored values in their place. The layers of prejit (`layers.linear`) know stored
dtypes themselves: see quantizing.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from prejit.compiler.base.stored_dtypes import STORED_DTYPES, StoredDtype
from prejit.compiler.models import quantizing
from prejit.compiler.models.narrow_matrices import NarrowMatrix, call_narrow, recording
from prejit.compiler.models.parameters import Parametrized
from prejit.compiler.models.protocol import Cache, EncoderDecoderModel
from prejit.compiler.models.quantizing import Values

_MIN_INPUTS = 64
"""Minimum values that share an output, and a scale. A stack of norms or biases has the form of a matrix and
must stay exact; few models have as many layers."""
_MIN_ELEMENTS = 64 * 64
"""Minimum elements of a matrix that is narrowed. A smaller one would save less than 12 KB."""
_POSITIONS = 8
"""Positions of the cache with which a decoder is traced to see what it does with its matrices."""
_LARGEST = float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)

Read = Callable[[], Values]


@dataclass(frozen=True)
class Stored:
    """A model as a bundle stores it.

    Attributes:
        model: the model apart from its stored parameters.
        values: functions that return the stored values of each parameter.
        orders: for each matrix whose axes are stored in another order, that order.
    """

    model: Parametrized
    values: Mapping[str, Read]
    orders: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def narrowed(
    model: Parametrized,
    values: Mapping[str, Read],
    dtype: str,
    matrices: Collection[str],
    *,
    out_in: bool = False,
) -> Stored:
    """Store matrices of a model in a narrow dtype.

    Args:
        model: the model.
        values: its values.
        dtype: a name in STORED_DTYPES.
        matrices: names of the parameters that may be narrowed. Those are that are float32, have enough
            elements, and whose values the dtype can hold; a mask of infinities stays what it is.
        out_in: whether matrices that a decoder only multiplies with are stored (out, in), as kernels read
            them.
    """
    stored = STORED_DTYPES[dtype]
    chosen = {
        name: _shared_axes(shape.shape)
        for name, shape in model.weights.items()
        if stored.is_narrow and name in matrices and _is_matrix(shape) and _fits(values[name]())
    }
    if not chosen:
        return Stored(model, values)
    made = _in_orders(model, values, stored, chosen, {})
    return _in_orders(model, values, stored, chosen, _out_in_orders(made)) if out_in else made


def _in_orders(
    model: Parametrized,
    values: Mapping[str, Read],
    stored: StoredDtype,
    chosen: Mapping[str, tuple[int, ...]],
    orders: Mapping[str, tuple[int, ...]],
) -> Stored:
    """Return a model with the chosen matrices in a dtype, each with the axes whose values share a scale."""
    weights, reads = dict(model.weights), dict(values)
    scales: dict[str, str] = {}
    layouts: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    for name, given in chosen.items():
        shape = model.weights[name].shape
        order = orders.get(name, tuple(range(len(shape))))
        shape = tuple(shape[axis] for axis in order)
        axes = tuple(sorted(order.index(axis) for axis in given))
        layouts[name] = axes, tuple(map(order.index, range(len(order))))
        read = partial(_ordered, values[name], order)
        weights[name] = jax.ShapeDtypeStruct(shape, jnp.dtype(stored.name))
        if not stored.has_scales:
            reads[name] = partial(_rounded, read)
            continue
        scales[name] = scale = _free(f"{name}_scale", weights)
        kept = tuple(size for axis, size in enumerate(shape) if axis not in axes)
        weights[scale] = jax.ShapeDtypeStruct(kept, jnp.float32)
        reads[name], reads[scale] = quantizing.quantizing(read, axes, stored)

    def bind(values: Mapping[str, Any]) -> Any:
        matrices = {
            name: NarrowMatrix(
                values[name], values[scales[name]] if name in scales else None, *layout, name
            )
            for name, layout in layouts.items()
        }
        others = {name: values[name] for name in model.weights if name not in chosen}
        # What does not depend on values is read from the stored ones: nothing is widened for it.
        shell = model.bind({name: values[name] for name in model.weights})
        kind = _NarrowEncoderDecoder if isinstance(shell, EncoderDecoderModel) else _NarrowDecoder
        return kind(
            shell.vocab_size,
            shell.max_positions,
            shell,
            matrices,
            lambda wide: model.bind({**others, **wide}),
        )

    ordered = dict(sorted(weights.items()))
    return Stored(
        Parametrized(ordered, bind), {name: reads[name] for name in ordered}, dict(orders)
    )


def _out_in_orders(made: Stored) -> dict[str, tuple[int, ...]]:
    """Return the order (out, in) of the axes of matrices that a decoder multiplies with, and does no more."""
    row = jax.ShapeDtypeStruct((1,), jnp.int32)
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)

    def call(weights: Mapping[str, Any], tokens: Any, start: Any, length: Any) -> Any:
        decoder = made.model.bind(weights)
        # The sizes of its sources are not known here.
        if isinstance(decoder, _NarrowEncoderDecoder):
            return None
        return decoder(tokens, start, length, decoder.make_cache(1, _POSITIONS, "float32"))

    with recording() as uses:
        try:
            jax.eval_shape(call, dict(made.model.weights), tokens, row, row)
        except Exception:  # of the user's code; a check with the manifest's sizes reports it
            return {}
    found = {}
    for name, kinds in uses.items():
        if None not in kinds and len(kinds) == 1:
            [inner] = kinds
            assert inner is not None
            axes = range(len(made.model.weights[name].shape))
            before = [axis for axis in axes if axis < inner[0]]
            after = [axis for axis in axes if axis > inner[-1]]
            found[name] = (*before, *after, *inner)
    return found


@dataclass(frozen=True)
class _Narrow:
    """A model whose matrices are stored in a narrow dtype.

    Attributes:
        vocab_size, max_positions: as in the protocol.
        shell: the model with the stored matrices, for what does not depend on them.
        matrices: the stored matrices by name.
        bind: returns the model with these matrices in float32.
    """

    vocab_size: int
    max_positions: int | None
    shell: Any
    matrices: Mapping[str, NarrowMatrix]
    bind: Callable[[Mapping[str, jax.Array]], Any]

    def __call__(
        self,
        tokens: jax.Array,
        start: jax.Array,
        length: jax.Array,
        cache: Cache,
        *,
        every: bool = False,
    ) -> tuple[jax.Array, Cache]:
        """See protocol.DecoderModel.

        Without the barrier XLA would widen what is no product before the loop over decode steps.
        """

        def call(wide: Mapping[str, jax.Array], *arguments: Any) -> Any:
            return self.bind(wide)(*arguments, every=every)

        matrices, tokens = lax.optimization_barrier((dict(self.matrices), tokens))
        return call_narrow(call, matrices, tokens, start, length, cache)


class _NarrowDecoder(_Narrow):
    """A decoder."""

    def make_cache(self, rows: int, positions: int, dtype: str) -> Cache:
        """See protocol.DecoderModel."""
        return call_narrow(
            lambda wide: self.bind(wide).make_cache(rows, positions, dtype), self.matrices
        )


class _NarrowEncoderDecoder(_Narrow):
    """An encoder-decoder."""

    def source(self, rows: int, size: int) -> jax.ShapeDtypeStruct:
        """See protocol.EncoderDecoderModel."""
        return self.shell.source(rows, size)

    def encode(self, source: jax.Array, length: jax.Array, positions: int, dtype: str) -> Cache:
        """See protocol.EncoderDecoderModel."""

        def encode(wide: Mapping[str, jax.Array], source: jax.Array, length: jax.Array) -> Cache:
            return self.bind(wide).encode(source, length, positions, dtype)

        return call_narrow(encode, self.matrices, source, length)


def _shared_axes(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the axes whose values share a scale; the last axis, of the outputs, is none of them.

    The axis before the last one holds the inputs of a matrix (in, out), also in a stack of layers or experts.
    If it is short, as the heads of (in, heads, head size), the axis before it is shared too, and so on.
    """
    axes: list[int] = []
    for axis in reversed(range(len(shape) - 1)):
        if math.prod(shape[each] for each in axes) >= _MIN_INPUTS:
            break
        axes.append(axis)
    return tuple(sorted(axes))


def _is_matrix(shape: jax.ShapeDtypeStruct) -> bool:
    inputs = math.prod(shape.shape[axis] for axis in _shared_axes(shape.shape))
    enough = inputs >= _MIN_INPUTS and math.prod(shape.shape) >= _MIN_ELEMENTS
    return shape.dtype == jnp.float32 and len(shape.shape) >= 2 and enough


def _fits(values: Values) -> bool:
    """Return whether all values are finite in bfloat16. NaN is not."""
    return bool(max(values.max(), -values.min()) <= _LARGEST)


def _free(name: str, taken: Collection[str]) -> str:
    while name in taken:
        name += "_"
    return name


def _ordered(read: Read, order: tuple[int, ...]) -> Values:
    return np.ascontiguousarray(read().transpose(order))


def _rounded(read: Read) -> Values:
    return read().astype(ml_dtypes.bfloat16)
