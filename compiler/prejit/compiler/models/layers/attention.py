"""Attention of new tokens over a KV cache, in XLA's form and by the native kernel.

A row of the cache is the vector of a head at a position, in the cache's dtype. One of float32 or bfloat16
has H elements. One of int8 has H integers of -127 to 127 and, behind them, the four bytes of the float32 by
which they are multiplied: the largest magnitude of the vector / 127. So both arrive in one stream, and
whatever moves rows moves their factors. attention_vector.h writes the same bytes.

A vector with an element that is no finite number becomes NaN as a whole: it is not hidden. A vector whose
magnitudes are all below 2^-100 becomes zeros, so that no factor is a number that some processors flush.

Shapes: H head size, W width of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from prejit.compiler.models.layers import kernel_calls, rope
from prejit.compiler.models.layers.linear import RMSNorm

LayerCache = tuple[jax.Array, ...]
"""Keys and values of one layer, each [B, K, S, W]; or what else a layer keeps."""

KVCache = tuple[LayerCache, ...]
"""One LayerCache for each of the L layers; empty for one that reads keys and values of another."""
_FACTOR_BYTES = 4
_LEAST = 2.0**-100


def row_width(size: int, dtype: str) -> int:
    """Return W for a head size."""
    return size + _FACTOR_BYTES if dtype == "int8" else size


def stored_rows(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Return vectors [..., H] of float32 as rows of a cache: [..., W]."""
    if jnp.dtype(dtype) != jnp.int8:
        return x.astype(dtype)
    most = jnp.abs(x).max(-1)
    factor = jnp.where(most >= _LEAST, most * jnp.float32(1 / 127), 0)
    inverse = jnp.where(factor > 0, 1 / factor, 0)
    factor = jnp.where(jnp.isfinite(x).all(-1), factor, jnp.nan)
    integers = lax.round(x * inverse[..., None], lax.RoundingMethod.TO_NEAREST_EVEN)
    integers = jnp.where(jnp.isfinite(factor)[..., None], integers, 0).astype(jnp.int8)
    tail = lax.bitcast_convert_type(factor, jnp.int8)
    return jnp.concatenate([integers, tail], -1)


def read_rows(rows: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Return the elements [..., H] of rows [..., W] in their dtype, and the factors [...] of int8."""
    if rows.dtype != jnp.int8:
        return rows, None
    return rows[..., :-_FACTOR_BYTES], lax.bitcast_convert_type(
        rows[..., -_FACTOR_BYTES:], jnp.float32
    )


def empty_layer(rows: int, heads: int, positions: int, head_size: int, dtype: str) -> LayerCache:
    """Return keys and values of a layer, zeros [B, K, S, W]."""
    width = row_width(head_size, dtype)

    def zeros() -> jax.Array:  # one array for each place: a caller may donate them
        return jnp.zeros((rows, heads, positions, width), jnp.dtype(dtype))

    return zeros(), zeros()


@dataclass(frozen=True)
class HeadChange:
    """What each head of queries and keys goes through before they meet: a norm, then a turn by its position.

    Attributes:
        turns: how heads turn at the new positions.
        norms: the norm of a query head and of a key head; empty: they have none.
    """

    turns: rope.Turns
    norms: tuple[RMSNorm, ...] = ()

    def __call__(self, query: jax.Array, keys: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the heads of all new tokens changed: float32 [B, T, N, H] and [B, T, K, H]."""
        if self.norms:
            query, keys = self.norms[0](query), self.norms[1](keys)
        return rope.turn(query, self.turns), rope.turn(keys, self.turns)

    def options(self, size: int) -> dict[str, Any]:
        """Return it as options of `kernel_calls.attention`, for heads of this size."""
        turns = self.turns
        options = {"turns": (turns.cos, turns.sin), "is_interleaved": turns.is_interleaved}
        if not self.norms:
            return options
        first, scales = self.norms[0], [norm.scales(size) for norm in self.norms]
        return {**options, "norms": scales, "epsilon": first.epsilon, "offset": first.offset}


@dataclass(frozen=True)
class NewTokens:
    """The positions of the new tokens of each row: `length` valid tokens, then padding.

    Attributes:
        start: int32 [B], the position of the first new token.
        length: int32 [B], the number of valid tokens.
        count: T.
        every: whether the model computes results for every token; otherwise for the last valid one only.
        ends: int32 [B, T], the last position that each token sees, its own or a later one, which the kernel
            cannot do; None: its own.
    """

    start: jax.Array
    length: jax.Array
    count: int
    every: bool = False
    ends: jax.Array | None = None

    @property
    def positions(self) -> jax.Array:
        """The position of each new token: int32 [B, T]."""
        return self.start[:, None] + jnp.arange(self.count)

    @property
    def are_valid(self) -> jax.Array:
        """False where a new token is padding: bool [B, T]."""
        return jnp.arange(self.count) < self.length[:, None]

    def wanted(self, x: jax.Array) -> jax.Array:
        """Return the part of x [B, T, ...] that results need: the last valid token of each row, or all."""
        if x.shape[1] == 1 or self.every:
            return x
        index = jnp.maximum(self.length - 1, 0).reshape(-1, *[1] * (x.ndim - 1))
        return jnp.take_along_axis(x, index, axis=1, mode="clip")

    def attend(
        self,
        query: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        layer: LayerCache,
        scale: float,
        *,
        last: bool,
        window: int | None = None,
        cap: float | None = None,
        bias: jax.Array | None = None,
        sinks: jax.Array | None = None,
        chunk: int | None = None,
        change: HeadChange | None = None,
    ) -> tuple[jax.Array, LayerCache]:
        """Write the new tokens into the cache and attend to it.

        Args:
            query: float32 [B, T, N, H].
            keys: float32 [B, T, K, H].
            values: float32 [B, T, K, H].
            layer: the cache.
            scale: factor of the scores.
            last: whether this is the last layer, which computes only what results need.
            window: number of tokens that each one sees, itself included; None for all up to its own.
            cap: soft bound of the scores: cap * tanh(score / cap); None for no bound.
            bias: float32 [B, T, N, S], added to the scores, which the kernel cannot do; None for none.
            sinks: float32 [N], scores of no position, which the kernel does not have; None for none.
            chunk: length of the parts of a text whose tokens see none of another part, which the kernel
                cannot do; None: it has no parts.
            change: what queries and keys still have to go through; None: nothing.

        Returns:
            float32 [B, T, N * H], or [B, 1, N * H] in the last layer; the cache.
        """
        ends = self.ends
        others: tuple[Any, ...] = (bias, sinks, ends, chunk)
        if kernel_calls.has_kernels() and all(each is None for each in others):
            query = self.wanted(query) if last else query
            bounds: dict[str, Any] = {"window": window, "cap": cap}
            bounds |= {} if change is None else change.options(query.shape[-1])
            return self._call_kernel(query, (keys, values), layer, scale, **bounds)
        if change is not None:
            query, keys = change(query, keys)
        if last:
            query = self.wanted(query)
            bias = None if bias is None else self.wanted(bias)
        layer = self.write(layer, keys, values)
        positions = self.wanted(self.positions) if last else self.positions
        if last and ends is not None:
            ends = self.wanted(ends)
        bounds = {"window": window, "cap": cap, "ends": ends, "chunk": chunk}
        mixed = attention(query, layer, positions, scale, bias=bias, sinks=sinks, **bounds)
        return mixed, layer

    def attend_packed(
        self,
        packed: jax.Array,
        heads: int,
        layer: LayerCache,
        scale: float,
        *,
        last: bool,
        window: int | None = None,
        cap: float | None = None,
    ) -> tuple[jax.Array, LayerCache]:
        """Do what `attend` does, with the kernel, on an array that holds query, keys and values together.

        `packed` is float32 [B, T, N + 2 K, H]: query, keys, values. `heads` is N.
        """
        query = self.wanted(packed) if last else packed
        places = {"heads": heads, "key_head": heads, "value_head": heads + layer[0].shape[1]}
        bounds: dict[str, Any] = {"window": window, "cap": cap}
        return self._call_kernel(query, (packed, packed), layer, scale, **bounds, **places)

    def _call_kernel(
        self,
        query: jax.Array,
        new: tuple[jax.Array, jax.Array],
        layer: LayerCache,
        scale: float,
        **options: Any,
    ) -> tuple[jax.Array, LayerCache]:
        """Call `kernel_calls.attention`. Queries are of all new tokens, or of the last valid ones."""
        first = self.start
        if query.shape[1] != self.count:
            first = first + jnp.maximum(self.length - 1, 0)
        mixed, layer = kernel_calls.attention(
            query, new, self.start, self.length, first, layer, scale=scale, **options
        )
        return mixed.reshape(*query.shape[:2], -1), layer

    def write(self, layer: LayerCache, keys: jax.Array, values: jax.Array) -> LayerCache:
        """Return the cache with the keys and values [B, T, K, H] of the valid tokens at their positions.

        The update is in place if the cache is donated. Without the conditional XLA:CPU duplicates the update
        into whatever reads the cache next and copies all of it, four times a step: 100 ms instead of 28 at
        S = 1024. Its predicate must depend on an argument, or XLA would fold it away. On a GPU a conditional
        splits the graph of kernels that a step launches, so there the update stands alone.
        """
        if jax.sharding.get_abstract_mesh().empty:
            return self._write(layer, keys, values)
        # With shard_map every device writes into its own part. Without it XLA gathers a cache that is split
        # by rows: it does not see that each row is updated on one device only.
        rows, cache = PartitionSpec("data"), PartitionSpec("data", "tensor")
        new = PartitionSpec("data", None, "tensor")

        def write(
            start: jax.Array, length: jax.Array, layer: LayerCache, *new: jax.Array
        ) -> LayerCache:
            return NewTokens(start, length, self.count)._write(layer, *new)

        in_specs = (rows, rows, (cache, cache), new, new)
        mapped = jax.shard_map(write, in_specs=in_specs, out_specs=(cache, cache))
        return mapped(self.start, self.length, layer, keys, values)

    def _write(self, layer: LayerCache, keys: jax.Array, values: jax.Array) -> LayerCache:
        room = (self.length > 0) & (self.start < layer[0].shape[2])

        def update(layer: LayerCache) -> LayerCache:
            new = (stored_rows(each, layer[0].dtype) for each in (keys, values))
            first, second = map(self._update, layer, new)
            return first, second

        def update_if(layer: LayerCache) -> LayerCache:
            return lax.cond(jnp.any(room), update, lambda layer: layer, layer)

        return lax.platform_dependent(layer, cpu=update_if, default=update)

    def _update(self, cache: jax.Array, new: jax.Array) -> jax.Array:
        """Write one row after another: a scatter costs more, and a chain of updates stays in place."""
        _, heads, slots, width = cache.shape
        block = (1, heads, self.count, width)

        def update(row: int | jax.Array, cache: jax.Array) -> jax.Array:
            # XLA clamps the position of an update, so a block that runs past the end would overwrite earlier
            # positions. Such a block is moved back by `shift`, and its content forward.
            at = jnp.clip(self.start[row], 0, slots - self.count)
            shift = self.start[row] - at
            token = jnp.arange(self.count) - shift
            valid = (token >= 0) & (token < self.length[row])
            own = (
                new[row : row + 1]
                if isinstance(row, int)
                else lax.dynamic_slice_in_dim(new, row, 1)
            )
            content = _shifted(own.swapaxes(1, 2), shift)
            present = lax.dynamic_slice(cache, (row, 0, at, 0), block)
            content = jnp.where(valid[:, None], content, present)
            return lax.dynamic_update_slice(cache, content, (row, 0, at, 0))

        return each_row(len(new), update, cache)


def _shifted(block: jax.Array, shift: jax.Array) -> jax.Array:
    """Return a block [1, K, T, H] moved forward by shift >= 0 positions; the first `shift` are arbitrary."""
    count = block.shape[2]
    if count == 1:
        return block
    return lax.dynamic_slice_in_dim(jnp.concatenate([block, block], 2), count - shift, count, 2)


def attention(
    query: jax.Array,
    layer: LayerCache,
    positions: jax.Array,
    scale: float,
    *,
    window: int | None = None,
    cap: float | None = None,
    bias: jax.Array | None = None,
    sinks: jax.Array | None = None,
    ends: jax.Array | None = None,
    chunk: int | None = None,
) -> jax.Array:
    """Return attention of each token to the cache up to its own position.

    The cache is not rearranged. The query is, so that the G = N / K query heads that share a key/value head
    are rows of one product with it.

    Args:
        query: float32 [B, T, N, H].
        layer: the cache with the new tokens in it.
        positions: int32 [B, T], or [B, 1]: the last position that each token sees, its own.
        scale: factor of the scores.
        window: as in `NewTokens.attend`.
        cap: as in `NewTokens.attend`.
        bias: as in `NewTokens.attend`; or [1, T, N, S], the same for all rows.
        sinks: as in `NewTokens.attend`.
        ends: int32 like positions: the last position that each token sees, if that is not its own.
        chunk: as in `NewTokens.attend`.

    Returns:
        float32 [B, T, N * H].
    """
    (keys, key_factors), (values, value_factors) = map(read_rows, layer)
    batch, count, heads, size = query.shape
    kv_heads, slots = keys.shape[1:3]
    grouped = (batch, kv_heads, heads // kv_heads, count)  # B, K, G, T
    rows = (batch, kv_heads, -1)  # B, K, G * T
    query = (query * scale).reshape(batch, count, kv_heads, -1, size).transpose(0, 2, 3, 1, 4)
    scores = _batched_dot(query.reshape(*rows, size), keys, 3)
    if key_factors is not None:
        scores *= key_factors[:, :, None]
    scores = scores.reshape(*grouped, slots)
    if cap is not None:
        scores = cap * jnp.tanh(scores / cap)
    if bias is not None:
        scores += bias.swapaxes(1, 2).reshape(-1, *grouped[1:], slots)
    slot = jnp.arange(slots)
    visible = slot <= (positions if ends is None else ends)[:, None, None, :, None]
    # Padding may stand beyond the end, where its window would be empty and its softmax NaN.
    last = jnp.minimum(positions, slots - 1)[:, None, None, :, None]
    if window is not None:
        visible &= slot > last - window
    if chunk is not None:
        visible &= slot >= last // chunk * chunk
    scores = jnp.where(visible, scores, -jnp.inf)
    if sinks is None:
        weights = jax.nn.softmax(scores)
    else:
        of_head = sinks.reshape(1, kv_heads, -1, 1, 1)
        largest = jnp.maximum(scores.max(-1, keepdims=True), of_head)
        exponents = jnp.exp(scores - largest)
        weights = exponents / (exponents.sum(-1, keepdims=True) + jnp.exp(of_head - largest))
    weights = weights.reshape(*rows, slots)
    if value_factors is not None:
        weights *= value_factors[:, :, None]
    mixed = _mixed(weights, values).reshape(*grouped, size)
    return mixed.transpose(0, 3, 1, 2, 4).reshape(batch, count, heads * size)


def attention_to_all(
    query: jax.Array, layer: LayerCache, length: jax.Array, scale: float
) -> tuple[jax.Array, LayerCache]:
    """Return attention of new tokens to all positions of a cache that does not change, such as a source's.

    Args:
        query: float32 [B, T, N, H]; N is K.
        layer: the cache.
        length: int32 [B], the number of valid tokens. What other tokens get is meaningless, but finite.
        scale: factor of the scores.

    Returns:
        float32 [B, T, N * H]; the cache, which the kernel has to return because it gets its memory.
    """
    slots = layer[0].shape[2]
    if not kernel_calls.has_kernels():
        positions = jnp.full(query.shape[:2], slots - 1)
        return attention(query, layer, positions, scale), layer
    # Tokens behind the end of a cache see all of it, and none of them is written.
    end = jnp.full(len(query), slots, jnp.int32)
    behind = NewTokens(end, length, query.shape[1])
    return behind.attend(query, query, query, layer, scale, last=False)


def _mixed(weights: jax.Array, values: jax.Array) -> jax.Array:
    """Return the sums of a cache's values [B, K, S, H] by the weights [B, K, R, S] of attention."""

    def whole(weights: jax.Array, values: jax.Array) -> jax.Array:
        return _batched_dot(weights, values, 2)

    return lax.platform_dependent(weights, values, cuda=mixed_in_parts, default=whole)


_PART = 64
"""Positions of a part of a cache that a GPU sums beside the other parts."""


def mixed_in_parts(weights: jax.Array, values: jax.Array) -> jax.Array:
    """Return what `_mixed` does, from sums of parts of the positions.

    Few rows are one tile of a GPU's product, and one core sums a tile: along 1,024 positions it took 53 us on
    an H200, where the product with the keys took 5.
    """
    parts, rest = divmod(values.shape[2], _PART)
    if rest or weights.shape[2] > _PART:
        return _batched_dot(weights, values, 2)
    weights = weights.reshape(*weights.shape[:3], parts, _PART)
    values = values.astype(jnp.float32).reshape(*values.shape[:2], parts, _PART, values.shape[3])
    sums: jax.Array = lax.dot_general(weights, values, (((4,), (3,)), ((0, 1, 3), (0, 1, 2))))
    return sums.sum(2)


def _batched_dot(x: jax.Array, cache: jax.Array, contracted: int) -> jax.Array:
    """Return the product over the last axis of x and one of the cache, for each row and key/value head."""
    cache = cache.astype(jnp.float32)
    return lax.dot_general(x, cache, (((3,), (contracted,)), ((0, 1), (0, 1))))


UNROLLED_ROWS = 64
"""Maximum number of rows that are unrolled. The time to compile a chain of updates grows with the square of
its length: decode of 128 rows takes 107 s, with a loop 10 s."""

T = TypeVar("T")


def each_row(rows: int, update: Callable[[int | jax.Array, T], T], values: T) -> T:
    """Return `update(row, values)` for one row after another.

    `update` returns the values with one row changed, in place if they are donated.
    """
    if rows > UNROLLED_ROWS:
        return lax.fori_loop(0, rows, update, values)
    for row in range(rows):
        values = update(row, values)
    return values
