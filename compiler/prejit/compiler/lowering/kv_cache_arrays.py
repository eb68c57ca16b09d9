"""The cache of a decoder: which arrays it has, and which of their axes are rows and positions.

A model only says how to make a cache. So it is made, as shapes, for several numbers of rows and positions,
and the axes that differ are found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from prejit.compiler.lowering.user.flat_arrays import Example, arrays_of
from prejit.compiler.models.layers.layer_config import DecoderConfig
from prejit.compiler.models.layers.row_adapters import AdapterStacks
from prejit.compiler.models.parameters import Parametrized
from prejit.compiler.models.protocol import Cache, EncoderDecoderModel
from prejit.runtime.errors import BuildError
from prejit.runtime.format.arrays import Array
from prejit.runtime.format.checks.program_interfaces import sized

ROWS, POSITIONS, SOURCE = "batch", "context", "source"
"""The variables of a bucket that axes of a cache, or of a source, follow."""

_CHECK = "`prejit check-model` says more about a model of your own"


@dataclass(frozen=True)
class CacheLayout:
    """The arrays of a model's cache.

    Attributes:
        model: the model.
        dtype: the dtype of keys and values.
        source: the number of places of the longest source; None: the model is no encoder-decoder.
        arrays: the arrays in order, at one row and one position; `variables` says which axes follow them.
    """

    model: Parametrized
    dtype: str
    source: int | None
    arrays: tuple[Array, ...]

    def shapes(self, rows: int, positions: int) -> Cache:
        """Return the cache of this size, as a pytree of jax.ShapeDtypeStruct."""
        return _shapes(self.model, self.dtype, self.source, rows, positions)

    def sized(self, rows: int, positions: int, name: str = "cache") -> tuple[Array, ...]:
        """Return the arrays of a cache of this size as a program lists them, under a name of their own."""
        sizes = {ROWS: rows, POSITIONS: positions}
        return tuple(sized(array, sizes, name) for array in self.arrays)

    def fresh_rows(
        self, model: Any, cache: Cache, start: jax.Array, length: jax.Array, positions: int
    ) -> Cache:
        """Return the cache with the state of a new text in each row that begins one.

        Arrays with positions stay as they are: a model looks at no position before `start`.
        """
        if self.is_rewindable:
            return cache
        begins = (start == 0) & (length > 0)
        leaves, tree = jax.tree.flatten(cache)
        new = jax.tree.leaves(model.make_cache(len(start), positions, self.dtype))
        return tree.unflatten(
            leaf
            if POSITIONS in array.variables
            else jnp.where(begins.reshape(-1, *[1] * (leaf.ndim - 1)), fresh, leaf)
            for array, leaf, fresh in zip(self.arrays, leaves, new, strict=True)
        )

    @property
    def is_rewindable(self) -> bool:
        """True if a row can go back to an earlier position, because no array holds the state of a text."""
        return self.source is not None or all(POSITIONS in each.variables for each in self.arrays)


def cache_layout(model: Parametrized, shape: DecoderConfig, source: int | None) -> CacheLayout:
    """Find the arrays of a model's cache.

    Raises:
        BuildError: the arrays do not follow rows and positions as the protocol says.
    """
    base, taller, longer = (
        jax.tree_util.tree_leaves_with_path(_shapes(model, shape.cache_dtype, source, *sizes))
        for sizes in ((2, 5), (3, 5), (2, 7))
    )
    example = _shapes(model, shape.cache_dtype, source, 1, 1)
    named = arrays_of(Example(example, jax.tree.leaves(example)), "cache").arrays
    if not len(base) == len(taller) == len(longer) == len(named):
        raise BuildError(
            "cache: expected the same arrays for every number of rows and positions, found "
            f"{len(base)}, {len(taller)} and {len(longer)}",
            hint=_CHECK,
        )
    arrays = []
    for array, (path, at), (_, more), (_, long) in zip(named, base, taller, longer, strict=True):
        where = f"cache{jax.tree_util.keystr(path)}"
        by_row = _differing(at.shape, more.shape)
        by_position = _differing(at.shape, long.shape)
        if by_row != [0] or (at.shape[0], more.shape[0]) != (2, 3):
            raise BuildError(
                f"{where}: expected the first axis, and no other, to be rows; found {list(at.shape)} for "
                f"2 rows, {list(more.shape)} for 3",
                hint=_CHECK,
            )
        if len(by_position) > 1 or any((at.shape[n], long.shape[n]) != (5, 7) for n in by_position):
            raise BuildError(
                f"{where}: expected at most one axis of positions, of their exact number; found "
                f"{list(at.shape)} for 5 positions, {list(long.shape)} for 7",
                hint=_CHECK,
            )
        variables = [
            ROWS if n == 0 else POSITIONS if n in by_position else "" for n in range(len(at.shape))
        ]
        path_of = ("cache", *array.path)
        arrays.append(replace(array, path=path_of, variables=tuple(variables)))
    return CacheLayout(model, shape.cache_dtype, source, tuple(arrays))


def source_array(model: Parametrized, size: int, rows: int = 1) -> Array:
    """Return the source that an encoder-decoder reads; `variables` says which axes follow rows and size.

    Raises:
        BuildError: the source does not follow rows and size.
    """
    one = _bound(model).source(rows, size)
    axis = max((n for n, found in enumerate(one.shape) if n and found == size), default=None)
    if one.shape[0] != rows or axis is None:
        raise BuildError(
            f"source: expected {rows} rows as the first axis and one axis of size {size}, found "
            f"{list(one.shape)}",
            hint=_CHECK,
        )
    variables = tuple(
        ROWS if n == 0 else SOURCE if n == axis else "" for n in range(len(one.shape))
    )
    return Array(("source",), str(one.dtype), tuple(one.shape), False, (), variables)


def _shapes(
    model: Parametrized, dtype: str, source: int | None, rows: int, positions: int
) -> Cache:
    if source is None:
        return jax.eval_shape(
            lambda weights: model.bind(weights).make_cache(rows, positions, dtype),
            dict(model.weights),
        )
    return jax.eval_shape(
        lambda weights, given, length: model.bind(weights).encode(given, length, positions, dtype),
        dict(model.weights),
        _bound(model).source(rows, source),
        jax.ShapeDtypeStruct((rows,), jnp.int32),
    )


def _bound(model: Parametrized) -> EncoderDecoderModel:
    """Return the model with shapes for parameters, for methods that compute nothing."""
    return model.bind(dict(model.weights))


def _differing(one: tuple[int, ...], other: tuple[int, ...]) -> list[int]:
    """Return the axes whose sizes differ; [-1] if the numbers of axes do."""
    if len(one) != len(other):
        return [-1]
    return [axis for axis, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]]


def padded_cache(cache: Cache, arrays: Sequence[Array | jax.Array]) -> Cache:
    """Return a cache whose axes of a shorter source are padded with zeros to the sizes of `arrays`."""
    leaves, tree = jax.tree.flatten(cache)

    def pad(leaf: jax.Array, array: Array | jax.Array) -> jax.Array:
        missing = [(0, want - size) for size, want in zip(leaf.shape, array.shape, strict=True)]
        return jnp.pad(leaf, missing) if any(after for _, after in missing) else leaf

    return tree.unflatten(map(pad, leaves, arrays))


def decoder_fields(
    layout: CacheLayout, shape: DecoderConfig, adapters: AdapterStacks | None
) -> Mapping[str, Any]:
    """Return the fields of `bundle_schema.Decoder` that the model decides."""
    found: dict[str, Any] = {
        "family": shape.family,
        "vocab_size": shape.vocab_size,
        "cache_dtype": shape.cache_dtype,
        "max_positions": shape.max_positions,
        "cache": tuple(map(str, layout.arrays)),
    }
    if adapters is not None:
        found["adapters"] = tuple(map(str, adapters.arrays))
    if layout.source is not None:
        array = source_array(layout.model, layout.source)
        found["source"] = str(replace(array, shape=array.shape_at({ROWS: 1, SOURCE: 1})))
    return found
