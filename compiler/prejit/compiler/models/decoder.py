"""What decoder families share: linear layers, attention over a KV cache, writing into the cache.

The forms were chosen by measuring XLA:CPU on two threads, with jax 0.10.2 and 0.12.0 alike; figures in
comments come from there. Nothing here depends on the platform for its values.

Shapes: B batch, T new positions, S cache positions, L layers, N query heads, K key/value heads,
H head size, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec

from prejit.compiler.wording import did_you_mean, shown
from prejit.runtime.errors import CheckpointError

LayerCache = tuple[jax.Array, jax.Array]
"""Keys and values of one layer, each float32 [B, K, S, H]."""

KVCache = tuple[LayerCache, ...]
"""One LayerCache for each of the L layers."""

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_new": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu_pytorch_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
}
"""By the names of transformers/activations.py, ACT2CLS."""


@dataclass(frozen=True)
class DecoderConfig:
    """What lowering and generation need to know of any decoder.

    Attributes:
        family: `gpt2`, `llama`.
        vocab_size: V, logits of a token.
        num_layers, num_kv_heads, head_size: L, K, H; the cache is L x (keys, values) of [B, K, S, H].
        cache_dtype: NumPy's name.
        max_positions: the longest context that the model was made for.
    """

    family: str
    vocab_size: int
    num_layers: int
    num_kv_heads: int
    head_size: int
    cache_dtype: str
    max_positions: int


@dataclass(frozen=True)
class Naming:
    """How the published checkpoints of a family name what its module calls otherwise or has not.

    Attributes:
        prefix: that checkpoints of the model without a head leave out: `transformer.`.
        head, embedding: a checkpoint of a tied model may hold either, or both with equal values.
        in_out: ends of the names of matrices that torch publishes (in, out).
        buffers: ends of the names of tensors that are no parameters.
    """

    prefix: str
    head: str
    embedding: str
    in_out: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Split:
    """Which parameters of a family the `tensor` axis of a mesh splits, by the last names of their modules.

    As in Shoeybi et al. 2019 (Megatron-LM), arXiv 1909.08053, section 3: a block sums over the devices
    twice, after attention and after the MLP. Every parameter that is not named is on every device.

    Attributes:
        outputs: linear layers split by their outputs, with their biases: a device has some of the heads,
            or a part of the MLP.
        inputs: linear layers split by their inputs: what devices give adds up, and the bias is added to
            that.
        vocabulary: tables and heads split by tokens, where the vocabulary divides.
    """

    outputs: tuple[str, ...]
    inputs: tuple[str, ...]
    vocabulary: tuple[str, ...]


class Decoder(Protocol):
    """What every family's module is called as."""

    def __call__(
        self, tokens: jax.Array, start: jax.Array, length: jax.Array, cache: KVCache
    ) -> tuple[jax.Array, KVCache]:
        """Logits after the new tokens, and the cache with them in it.

        Prefill, chunked prefill and decode are this one function. Only valid tokens enter the cache,
        and none beyond its end.

        Args:
            tokens: int32 [B, T], T <= S; in row b the first length[b] are valid, the rest is padding.
            start: int32 [B]; the position of tokens[b, 0].
            length: int32 [B]; 0 for a row that rests, whose logits then mean nothing.
            cache: holds the positions before start. What lies behind them counts for nothing, if finite.

        Returns:
            float32 [B, V], for the last valid token of each row, and the cache.
        """
        ...


class Linear(nnx.Module):
    """y = x W^T + b. W is one array, (out, in) or (in, out) as `is_stored_in_out` says."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool) -> None:
        self.in_out = is_stored_in_out(inputs, outputs)
        shape = (inputs, outputs) if self.in_out else (outputs, inputs)
        self.weight = nnx.Param(jnp.zeros(shape))
        self.bias = nnx.Param(jnp.zeros(outputs)) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """Float32 [..., in] to [..., out]."""
        y = dot(x, self.weight[...], 0 if self.in_out else 1)
        return y if self.bias is None else y + self.bias[...]


def is_stored_in_out(inputs: int, outputs: int) -> bool:
    """Whether XLA:CPU is faster with a matrix stored (in, out) than with (out, in).

    For one token, (out, in) streams rows of 1024 and more at up to 94 % of the memory bandwidth. With shorter
    ones (in, out) is up to 1.5 x as fast, if its rows are longer and the result stays in the first-level
    cache. For several tokens XLA transposes what is stored (out, in) on every call. Together, GPT-2-124M
    against all (out, in): decode 0.93 x the time, batch of 4 0.87 x, prefill of 32 or 512 tokens 0.87 x.
    """
    return inputs < 1024 and inputs < outputs <= 4096


class Embedding(nnx.Module):
    """A table of rows, [number, D]."""

    def __init__(self, number: int, width: int) -> None:
        self.weight = nnx.Param(jnp.zeros((number, width)))

    def __call__(self, index: jax.Array) -> jax.Array:
        """The rows of an int32 [...] index, [..., D]; an index out of range takes the nearest row."""
        rows: jax.Array = self.weight[...].at[index].get(mode="clip")
        return rows

    def logits(self, x: jax.Array) -> jax.Array:
        """X [..., D] against every row, as a tied head does: [..., number]."""
        return dot(x, self.weight[...], 1)


def dot(x: jax.Array, weight: jax.Array, contracted: int) -> jax.Array:
    """Product over the last axis of x and one axis of a matrix; the matrix is not rearranged."""
    return lax.dot_general(x, weight, (((x.ndim - 1,), (contracted,)), ((), ())))


def split(x: jax.Array, *axes: str | None) -> jax.Array:
    """X, its dimensions split over these axes of the mesh in context; where there is no mesh, x itself."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    constrained: jax.Array = lax.with_sharding_constraint(x, PartitionSpec(*axes))
    return constrained


@dataclass(frozen=True)
class NewTokens:
    """Where the new tokens of each row stand. The tokens of a row are `length` valid ones, then padding.

    Attributes:
        start: int32 [B], the position of the first.
        length: int32 [B], how many of the T are valid.
        count: T.
    """

    start: jax.Array
    length: jax.Array
    count: int

    @property
    def positions(self) -> jax.Array:
        """Int32 [B, T]."""
        return self.start[:, None] + jnp.arange(self.count)

    def last(self, x: jax.Array) -> jax.Array:
        """Of x [B, T, ...] what belongs to the last valid token of each row, [B, 1, ...]."""
        if self.count == 1:
            return x
        index = jnp.maximum(self.length - 1, 0).reshape(-1, *[1] * (x.ndim - 1))
        return jnp.take_along_axis(x, index, axis=1, mode="clip")

    def write(self, layer: LayerCache, keys: jax.Array, values: jax.Array) -> LayerCache:
        """The cache with the keys and values [B, T, K, H] of the valid tokens at their positions.

        In place where the cache is donated. Without the conditional XLA:CPU duplicates the update into
        whatever reads the cache next and copies all of it, four times a step: 100 ms instead of 28 at
        S = 1024. Its predicate must depend on an argument, or it would be folded away.
        """
        if jax.sharding.get_abstract_mesh().empty:
            return self._write(layer, keys, values)
        # Every device writes into its own part. Left to itself, XLA would gather a cache that is split by
        # rows: that each row is updated on one device alone is more than it finds out.
        rows, cache = PartitionSpec("data"), PartitionSpec("data", "tensor")
        new = PartitionSpec("data", None, "tensor")

        def write(
            start: jax.Array, length: jax.Array, layer: LayerCache, *new: jax.Array
        ) -> LayerCache:
            return NewTokens(start, length, self.count)._write(layer, *new)

        in_specs = (rows, rows, (cache, cache), new, new)
        mapped = jax.shard_map(write, in_specs=in_specs, out_specs=(cache, cache))
        written: LayerCache = mapped(self.start, self.length, layer, keys, values)
        return written

    def _write(self, layer: LayerCache, keys: jax.Array, values: jax.Array) -> LayerCache:
        room = (self.length > 0) & (self.start < layer[0].shape[2])

        def update(layer: LayerCache) -> LayerCache:
            return self._update(layer[0], keys), self._update(layer[1], values)

        updated: LayerCache = lax.cond(jnp.any(room), update, lambda layer: layer, layer)
        return updated

    def _update(self, cache: jax.Array, new: jax.Array) -> jax.Array:
        """One row after another: a scatter costs more, and a chain of updates stays in place."""
        _, heads, slots, size = cache.shape
        block = (1, heads, self.count, size)
        for row in range(len(new)):
            # A block that would run past the end is moved back by `shift`, and its content forward:
            # XLA clamps the position of an update, so it would overwrite earlier positions.
            at = jnp.clip(self.start[row], 0, slots - self.count)
            shift = self.start[row] - at
            token = jnp.arange(self.count) - shift
            valid = (token >= 0) & (token < self.length[row])
            content = _shifted(new[row : row + 1].swapaxes(1, 2), shift)
            present = lax.dynamic_slice(cache, (row, 0, at, 0), block)
            content = jnp.where(valid[:, None], content, present)
            cache = lax.dynamic_update_slice(cache, content, (row, 0, at, 0))
        return cache


def _shifted(block: jax.Array, shift: jax.Array) -> jax.Array:
    """A block [1, K, T, H] moved forward by shift >= 0 positions; what comes in is arbitrary."""
    count = block.shape[2]
    if count == 1:
        return block
    return lax.dynamic_slice_in_dim(jnp.concatenate([block, block], 2), count - shift, count, 2)


def attention(query: jax.Array, layer: LayerCache, positions: jax.Array, scale: float) -> jax.Array:
    """Attention of each token to the cache up to its own position.

    The cache is read as it lies: only the query is rearranged, so that the G = N / K query heads that
    share a key/value head are rows of one product with it.

    Args:
        query: float32 [B, T, N, H].
        layer: the cache with the new tokens in it.
        positions: int32 [B, T], of the new tokens.
        scale: of the scores.

    Returns:
        float32 [B, T, N * H].
    """
    keys, values = layer
    batch, count, heads, size = query.shape
    kv_heads, slots = keys.shape[1:3]
    grouped = (batch, kv_heads, heads // kv_heads, count)  # B, K, G, T
    rows = (batch, kv_heads, -1)  # B, K, G * T
    query = (query * scale).reshape(batch, count, kv_heads, -1, size).transpose(0, 2, 3, 1, 4)
    scores = _batched_dot(query.reshape(*rows, size), keys, 3).reshape(*grouped, slots)
    visible = jnp.arange(slots) <= positions[:, None, None, :, None]
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf))
    mixed = _batched_dot(weights.reshape(*rows, slots), values, 2).reshape(*grouped, size)
    return mixed.transpose(0, 3, 1, 2, 4).reshape(batch, count, heads * size)


def _batched_dot(x: jax.Array, cache: jax.Array, contracted: int) -> jax.Array:
    """Product over an axis of the cache and the last of x, for each row and key/value head."""
    return lax.dot_general(x, cache, (((3,), (contracted,)), ((0, 1), (0, 1))))


def require(config: Any, key: str, value: Any, allowed: Iterable[Any]) -> None:
    """Checks a value of config.json.

    Args:
        config: of transformers.
        key: as config.json says it; a dot leads into a table.
        value: of the key.
        allowed: what it may be.

    Raises:
        CheckpointError: it is none of those.
    """
    allowed = list(allowed)
    if value not in allowed:
        guess = did_you_mean(value, allowed) if isinstance(value, str) else ""
        raise unsupported(
            config,
            f"{key}: expected {' or '.join(map(shown, allowed))}, found {shown(value)}{guess}",
        )


def unsupported(config: Any, message: str) -> CheckpointError:
    """The error for a model that is not built here, with the name of its file."""
    return CheckpointError(
        f"{Path(config.name_or_path, 'config.json')}: {message}",
        hint="write the model as a JAX function or flax module and compile it as a [[program]]",
    )
