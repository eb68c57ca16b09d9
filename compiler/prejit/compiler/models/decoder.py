"""What decoder families share: linear layers, attention over a KV cache, writing into the cache.

The forms were chosen by measuring XLA:CPU on two threads, with jax 0.10.2 and 0.12.0 alike; figures in
comments come from there. Nothing here depends on the platform for its values.

Shapes: B batch, T new positions, S cache positions, L layers, N query heads, K key/value heads,
H head size, D model width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec

from prejit.compiler.models import forms
from prejit.compiler.models.rows import each_row
from prejit.compiler.products import KERNEL, LOOP, WIDENED, Product
from prejit.compiler.wording import did_you_mean, shown
from prejit.runtime.errors import CheckpointError

LayerCache = tuple[jax.Array, jax.Array]
"""Keys and values of one layer, each [B, K, S, H] of the cache's dtype."""

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


BRING_YOUR_OWN = (
    'bring the model as a flax module of your own: [[program]] with function = "my_package.model:model", '
    'args = its inputs, params = "model.safetensors"; a plain JAX function does as well'
)
"""The hint of errors about a model that is not built here."""


@dataclass(frozen=True)
class DecoderConfig:
    """What lowering and generation need to know of any decoder.

    Attributes:
        family: model_type of config.json: `gpt2`, `llama`, `gemma3_text`.
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
        ignored: starts of the names of tensors that the model has no use for: an image encoder.
        moved: starts of published names, each with ours.
    """

    prefix: str
    head: str
    embedding: str
    in_out: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    moved: tuple[tuple[str, str], ...] = ()


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
        self,
        tokens: jax.Array,
        start: jax.Array,
        length: jax.Array,
        cache: KVCache,
        *,
        every: bool = False,
    ) -> tuple[jax.Array, KVCache]:
        """Logits after the new tokens, and the cache with them in it.

        Prefill, chunked prefill, decode and the verification of drafts are this one function. Only valid
        tokens enter the cache, and none beyond its end.

        Args:
            tokens: int32 [B, T], T <= S; in row b the first length[b] are valid, the rest is padding.
            start: int32 [B]; the position of tokens[b, 0].
            length: int32 [B]; 0 for a row that rests, whose logits then mean nothing.
            cache: holds the positions before start. What lies behind them counts for nothing, if finite.
            every: whether logits are wanted after every token, not after the last one alone.

        Returns:
            float32 [B, V], for the last valid token of each row, and the cache; with `every`
            float32 [B, T, V], where those of padding mean nothing.
        """
        ...


class Linear(nnx.Module):
    """y = x W^T + b. W is one array, (out, in) or (in, out) as `is_stored_in_out` says.

    It may be stored as bfloat16, or as int8 with `weight_scale`, a float32 factor for each output: see
    precision.py.
    """

    def __init__(
        self, inputs: int, outputs: int, *, bias: bool, in_out: bool | None = None
    ) -> None:
        """Makes the matrix, `in_out` or, where that is None, as the rule says."""
        self.in_out = is_stored_in_out(inputs, outputs) if in_out is None else in_out
        shape = (inputs, outputs) if self.in_out else (outputs, inputs)
        self.weight = nnx.Param(jnp.zeros(shape))
        self.weight_scale: nnx.Param[jax.Array] | None = None
        self.bias = nnx.Param(jnp.zeros(outputs)) if bias else None

    @property
    def contracted(self) -> int:
        """The axis of W that the inputs are on."""
        return 0 if self.in_out else 1

    def __call__(
        self,
        x: jax.Array,
        *,
        activation: str | None = None,
        residual: jax.Array | None = None,
    ) -> jax.Array:
        """Float32 [..., in] to [..., out], through one of ACTIVATIONS, plus a residual."""
        if self.form(x) == KERNEL:
            return forms.linear(x, self.operand, activation=activation, residual=residual)
        y = scaled(self._dot(x), self.weight_scale)
        y = y if self.bias is None else y + self.bias[...]
        y = y if activation is None else ACTIVATIONS[activation](y)
        return y if residual is None else residual + y

    def form(self, x: jax.Array) -> str | None:
        """How the product with an x is computed; None: by the rules of `dot`."""
        return forms.form_of(_product(x, self.weight[...], self.contracted))

    @property
    def operand(self) -> forms.Operand:
        """As the kernel takes it."""
        scale = None if self.weight_scale is None else self.weight_scale[...]
        return forms.Operand(self.weight[...], scale, None if self.bias is None else self.bias[...])

    def _dot(self, x: jax.Array) -> jax.Array:
        return dot(x, self.weight[...], self.contracted, self.form(x))


def gated(gate: Linear, up: Linear, x: jax.Array, activation: str) -> jax.Array:
    """`activation(gate(x)) * up(x)`: float32 [..., in] to [..., out]."""
    if gate.form(x) == up.form(x) == KERNEL and (gate.bias is None) == (up.bias is None):
        return forms.linear(x, gate.operand, activation=activation, up=up.operand)
    return gate(x, activation=activation) * up(x)


def is_stored_in_out(inputs: int, outputs: int) -> bool:
    """Whether XLA:CPU is faster with a matrix stored (in, out) than with (out, in).

    Kernels read (out, in): where a bundle has some, all are stored so.

    For one token, (out, in) streams rows of 1024 and more at up to 94 % of the memory bandwidth. With shorter
    ones (in, out) is up to 1.5 x as fast, if its rows are longer and the result stays in the first-level
    cache. For several tokens XLA transposes what is stored (out, in) on every call. Together, GPT-2-124M
    against all (out, in): decode 0.93 x the time, batch of 4 0.87 x, prefill of 32 or 512 tokens 0.87 x.
    """
    return not forms.are_stored_out_in() and inputs < 1024 and inputs < outputs <= 4096


class Embedding(nnx.Module):
    """A table of rows, [number, D], stored as a Linear's; with int8 each row has a factor."""

    contracted = 1

    def __init__(self, number: int, width: int) -> None:
        self.weight = nnx.Param(jnp.zeros((number, width)))
        self.weight_scale: nnx.Param[jax.Array] | None = None

    def __call__(self, index: jax.Array) -> jax.Array:
        """The rows of an int32 [...] index, float32 [..., D]; an index out of range takes the nearest row."""
        rows = _rows(self.weight[...], index)
        if self.weight_scale is None:
            return rows
        return rows * self.weight_scale[...].at[index].get(mode="clip")[..., None]

    def logits(self, x: jax.Array) -> jax.Array:
        """X [..., D] against every row, as a tied head does: [..., number]."""
        weight = self.weight[...]
        form = forms.form_of(_product(x, weight, self.contracted))
        if form == KERNEL:
            scale = None if self.weight_scale is None else self.weight_scale[...]
            return forms.linear(x, forms.Operand(weight, scale))
        return scaled(dot(x, weight, self.contracted, form), self.weight_scale)


def _rows(table: jax.Array, index: jax.Array) -> jax.Array:
    """Rows of a table, in float32.

    XLA:CPU gathers no bfloat16: it converts the table, as a part of the gather. The barrier keeps it from
    moving that out of the loop over decode steps, where all of the table is converted: 154 MB of GPT-2.
    """
    if table.dtype != jnp.float32:
        table, index = lax.optimization_barrier((table, index))
    rows: jax.Array = table.at[index].get(mode="clip").astype(jnp.float32)
    return rows


def scaled(y: jax.Array, scale: nnx.Param[jax.Array] | None) -> jax.Array:
    """Y [..., out] times the factor of each output, where there are any."""
    return y if scale is None else y * scale[...]


def _product(x: jax.Array, weight: jax.Array, contracted: int) -> Product:
    inputs, outputs = weight.shape[contracted], weight.shape[1 - contracted]
    rows = math.prod(x.shape[:-1])
    return Product(str(weight.dtype), rows, inputs, outputs, contracted == 0)


def dot(x: jax.Array, weight: jax.Array, contracted: int, form: str | None = None) -> jax.Array:
    """Product over the last axis of x, float32, and one axis of a matrix; the matrix is not rearranged.

    A matrix of another dtype counts with the float32 values of its elements, and sums are float32. Beside
    kernels x is rounded to bfloat16 for such a matrix, as the kernels do it: forms are chosen by the number
    of rows, and a token must not be computed with other numbers where more rows share its product.

    Args:
        x: float32 [..., in].
        weight: the matrix.
        contracted: its axis of the inputs.
        form: one of XLA's in forms.py, of a target with kernels; None: by the number of rows, of a program
            without any.
    """
    if weight.dtype == jnp.float32:
        return lax.dot_general(x, weight, (((x.ndim - 1,), (contracted,)), ((), ())))
    rows = math.prod(x.shape[:-1])
    if form is None:
        many = rows > REDUCED_ROWS * (4 if weight.size > LARGE_MATRIX else 1)
        form = WIDENED if many else LOOP
    else:
        # Not by astype: XLA drops a pair of conversions that only loses precision.
        x = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    y = _widened_dot(x.reshape(-1, x.shape[-1]), weight, contracted, form)
    return y.reshape(*x.shape[:-1], -1)


REDUCED_ROWS = 8
"""Up to so many rows XLA:CPU multiplies and sums in one loop, in which bfloat16 and int8 are read as such."""
LARGE_MATRIX = 1 << 23
"""Elements; its float32 form is no longer in any cache, and the loop is faster for 4 times as many rows."""


def _widened_dot(x: jax.Array, weight: jax.Array, contracted: int, form: str) -> jax.Array:
    """x [R, in] and a matrix that is not float32, to float32 [R, out].

    XLA:CPU converts the operand of a dot as a whole. For some rows that is amortized; for one it costs
    5 x the product. GPT-2-124M, two threads, ms a step (float32 dot | converted | this):

        1 row   20 | 110 (and 4.5 tokens/s as a bfloat16 dot) | 29 bfloat16, 23 int8
        4 rows  53 | 130 | 45 bfloat16, 29 int8
        128     144 | 310 | 156 bfloat16, 145 int8

    The barrier keeps XLA from moving the conversion of all weights out of the loop over decode steps: 494
    MB of float32 instead of none. What is added to them, a zero that depends on x, keeps it from converting
    those of all layers before the first product, for the same 494 MB instead of 10.
    """
    rows = x.shape[0]
    weight, x = lax.optimization_barrier((weight, x))
    wide = weight.astype(jnp.float32)
    if form == WIDENED:
        if jax.sharding.get_abstract_mesh().empty:  # on a mesh not every device has x[0, 0]
            infinite = x[0, 0] > jnp.finfo(jnp.float32).max
            wide += jnp.where(infinite, jnp.float32(1), jnp.float32(0))
        return lax.dot_general(x, wide, (((1,), (contracted,)), ((), ())))
    if rows > 1:
        return (x[:, None, :] * wide if contracted else x[:, :, None] * wide).sum(1 + contracted)
    # With a dimension of one row XLA would write all the products down: 1400 ms instead of 30.
    return (x[0] * wide if contracted else x[0][:, None] * wide).sum(contracted)[None]


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
        every: whether a model gives its results after every token; else after the last valid one.
    """

    start: jax.Array
    length: jax.Array
    count: int
    every: bool = False

    @property
    def positions(self) -> jax.Array:
        """Int32 [B, T]."""
        return self.start[:, None] + jnp.arange(self.count)

    def wanted(self, x: jax.Array) -> jax.Array:
        """Of x [B, T, ...] what belongs to the last valid token of each row, [B, 1, ...]; or all of it."""
        if self.count == 1 or self.every:
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
    ) -> tuple[jax.Array, LayerCache]:
        """Puts the new tokens into the cache, and gives what they take from it.

        Args:
            query: float32 [B, T, N, H].
            keys: float32 [B, T, K, H].
            values: float32 [B, T, K, H].
            layer: the cache.
            scale: of the scores.
            last: whether only wanted tokens are of interest.
            window: how many tokens each one sees, itself the last of them; None: all up to its own.
            cap: scores come nearer and nearer to it and never pass it; None: they are free.

        Returns:
            float32 [B, T, N * H], or [B, 1, N * H] of the wanted; the cache.
        """
        if last:
            query = self.wanted(query)
        if forms.has_kernels():
            mixed, layer = forms.attention(
                query,
                (keys, values),
                self.start,
                self.length,
                self._first(query),
                layer,
                scale=scale,
                window=window,
                cap=cap,
            )
            return mixed.reshape(*query.shape[:2], -1), layer
        layer = self.write(layer, keys, values)
        positions = self.wanted(self.positions) if last else self.positions
        return attention(query, layer, positions, scale, window=window, cap=cap), layer

    def attend_packed(
        self, packed: jax.Array, heads: int, layer: LayerCache, scale: float, *, last: bool
    ) -> tuple[jax.Array, LayerCache]:
        """As attend, by the kernel, of arrays that are not taken apart.

        Args:
            packed: float32 [B, T, N + 2 K, H]: query, keys, values.
            heads: N.
            layer: the cache.
            scale: of the scores.
            last: whether only wanted tokens are of interest.
        """
        query = self.wanted(packed) if last else packed
        mixed, layer = forms.attention(
            query,
            (packed, packed),
            self.start,
            self.length,
            self._first(query),
            layer,
            scale=scale,
            window=None,
            cap=None,
            heads=heads,
            key_head=heads,
            value_head=heads + layer[0].shape[1],
        )
        return mixed.reshape(*query.shape[:2], -1), layer

    def _first(self, query: jax.Array) -> jax.Array:
        """The position of the first query of each row: of all new tokens, or of those that are wanted."""
        if query.shape[1] == self.count:
            return self.start
        return self.start + jnp.maximum(self.length - 1, 0)

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

        def update(row: int | jax.Array, cache: jax.Array) -> jax.Array:
            # A block that would run past the end is moved back by `shift`, and its content forward:
            # XLA clamps the position of an update, so it would overwrite earlier positions.
            at = jnp.clip(self.start[row], 0, slots - self.count)
            shift = self.start[row] - at
            token = jnp.arange(self.count) - shift
            valid = (token >= 0) & (token < self.length[row])
            own = (
                new[row : row + 1]
                if isinstance(row, int)
                else lax.dynamic_slice_in_dim(new, row, 1)
            )
            content = _shifted(own.swapaxes(1, 2), shift).astype(cache.dtype)
            present = lax.dynamic_slice(cache, (row, 0, at, 0), block)
            content = jnp.where(valid[:, None], content, present)
            return lax.dynamic_update_slice(cache, content, (row, 0, at, 0))

        return each_row(len(new), update, cache)


def _shifted(block: jax.Array, shift: jax.Array) -> jax.Array:
    """A block [1, K, T, H] moved forward by shift >= 0 positions; what comes in is arbitrary."""
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
) -> jax.Array:
    """Attention of each token to the cache up to its own position.

    The cache is read as it lies: only the query is rearranged, so that the G = N / K query heads that
    share a key/value head are rows of one product with it.

    Args:
        query: float32 [B, T, N, H].
        layer: the cache with the new tokens in it.
        positions: int32 [B, T], of the new tokens.
        scale: of the scores.
        window: how many tokens each one sees, itself the last of them; None: all up to its own.
        cap: scores come nearer and nearer to it and never pass it; None: they are free.

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
    if cap is not None:
        scores = cap * jnp.tanh(scores / cap)
    slot = jnp.arange(slots)
    visible = slot <= positions[:, None, None, :, None]
    if window is not None:
        # Padding may stand beyond the end, where its window would be empty and its softmax no number.
        last = jnp.minimum(positions, slots - 1)
        visible &= slot > last[:, None, None, :, None] - window
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf))
    mixed = _batched_dot(weights.reshape(*rows, slots), values, 2).reshape(*grouped, size)
    return mixed.transpose(0, 3, 1, 2, 4).reshape(batch, count, heads * size)


def _batched_dot(x: jax.Array, cache: jax.Array, contracted: int) -> jax.Array:
    """Product over an axis of the cache and the last of x, for each row and key/value head, in float32."""
    cache = cache.astype(jnp.float32)
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
        hint=BRING_YOUR_OWN,
    )
