"""T5: an encoder and a decoder with relative positions, RMSNorm before each part, no biases.

Sources: Raffel et al. 2019, arXiv 1910.10683, section 2.1; Shazeer 2020 (the gated MLP of T5 1.1), arXiv
2002.05202; transformers 5, models/t5/modeling_t5.py, with which the logits agree. T5 1.0 has one table for
source, text and head; T5 1.1 and Flan-T5 have a head of their own.

Shapes: B rows, T new tokens, S positions, N places of a source, K heads, H head size, D model width,
V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from prejit.compiler.models.layers.attention import NewTokens, attention
from prejit.compiler.models.layers.layer_config import (
    DecoderConfig,
    LayerCache,
    Naming,
    require,
    unsupported,
)
from prejit.compiler.models.layers.linear import ACTIVATIONS, Embedding, Linear, gated
from prejit.compiler.models.layers.norms import RMSNorm

NAMING = Naming(
    prefix="",
    head="lm_head.weight",
    embedding="shared.weight",
    # a table that old checkpoints have and no version of the model reads
    buffers=(".EncDecAttention.relative_attention_bias.weight",),
    copies=("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
)

Cache = tuple[jax.Array, tuple[tuple[LayerCache, LayerCache], ...]]
"""The lengths of the sources, int32 [B], and for each layer of the decoder the keys and values of the text,
each [B, K, S, H], and those of the source, each [B, K, N, H]."""


def describe(config: Any) -> DecoderConfig:
    """Return the sizes of a T5's decoder.

    Raises:
        CheckpointError: its configuration asks for something that is not built here.
    """
    key = "dense_act_fn, the last part of feed_forward_proj"
    require(config, key, config.dense_act_fn, ACTIVATIONS)
    require(config, "is_encoder_decoder", config.is_encoder_decoder, [True])
    exact = config.relative_attention_num_buckets // 2
    if config.relative_attention_max_distance <= exact:
        raise unsupported(
            config,
            f"relative_attention_max_distance: expected more than {exact}, half of "
            f"relative_attention_num_buckets, found {config.relative_attention_max_distance}",
        )
    return DecoderConfig(
        family="t5",
        vocab_size=config.vocab_size,
        cache_dtype="float32",
        max_positions=2**31 - 1,  # relative positions have no end
    )


def build(config: Any, context: int | None) -> T5:
    """Return a T5, which is the same for every context."""
    return T5(config)


class T5(nnx.Module):
    """A T5 with its language-model head. Parameters have the names of the published tensors.

    It is an EncoderDecoderModel (protocol.py).
    """

    def __init__(self, config: Any) -> None:
        self.vocab_size: int = config.vocab_size
        self.max_positions: int | None = None
        self.num_heads: int = config.num_heads
        self.head_size: int = config.d_kv
        self.shared = Embedding(config.vocab_size, config.d_model)
        self.encoder = EncoderStack(config)
        self.decoder = DecoderStack(config)
        self.tied_scale: float = config.d_model**-0.5
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.d_model, config.vocab_size, bias=False)

    def source(self, rows: int, size: int) -> jax.ShapeDtypeStruct:
        """Return the shape and dtype of B sources of N tokens: int32 [B, N]."""
        return jax.ShapeDtypeStruct((rows, size), jnp.int32)

    def encode(self, source: jax.Array, length: jax.Array, positions: int, dtype: str) -> Cache:
        """See EncoderDecoderModel."""
        x = self.encoder(self.shared(source), length)
        empty = jnp.zeros((len(source), self.num_heads, positions, self.head_size), dtype)
        read = (block.layer[1].EncDecAttention.keys_values(x) for block in self.decoder.block)
        layers = (((empty, empty), (k.astype(dtype), v.astype(dtype))) for k, v in read)
        return length, tuple(layers)

    def __call__(
        self,
        tokens: jax.Array,
        start: jax.Array,
        length: jax.Array,
        cache: Cache,
        *,
        every: bool = False,
    ) -> tuple[jax.Array, Cache]:
        """See EncoderDecoderModel."""
        new = NewTokens(start, length, tokens.shape[1], every)
        x, cache = self.decoder(self.shared(tokens), new, cache)
        x = x if every else x[:, 0]
        if hasattr(self, "lm_head"):
            return self.lm_head(x), cache
        return self.shared.logits(x * self.tied_scale), cache


class EncoderStack(nnx.Module):
    """The encoder, which reads a source."""

    def __init__(self, config: Any) -> None:
        self.block = nnx.List(
            [
                Block([SelfAttention(config, bias=layer == 0, causal=False), MLP(config)])
                for layer in range(config.num_layers)
            ]
        )
        self.final_layer_norm = RMSNorm(config.d_model, config.layer_norm_epsilon)

    def __call__(self, x: jax.Array, length: jax.Array) -> jax.Array:
        """Map x [B, N, D] to [B, N, D]. In each row only the first `length` places are valid."""
        places = jnp.arange(x.shape[1])[None]
        bias = self.block[0].layer[0].SelfAttention.relative_attention_bias(places, x.shape[1])
        for block in self.block:
            own, mlp = block.layer
            x = mlp(own.read(x, length, bias))
        return self.final_layer_norm(x)


class DecoderStack(nnx.Module):
    """The decoder without its head."""

    def __init__(self, config: Any) -> None:
        self.block = nnx.List(
            [
                Block(
                    [
                        SelfAttention(config, bias=layer == 0, causal=True),
                        CrossAttention(config),
                        MLP(config),
                    ]
                )
                for layer in range(config.num_decoder_layers)
            ]
        )
        self.final_layer_norm = RMSNorm(config.d_model, config.layer_norm_epsilon)

    def __call__(self, x: jax.Array, new: NewTokens, cache: Cache) -> tuple[jax.Array, Cache]:
        """Return the hidden states that results need, [B, 1, D] or [B, T, D], and the cache."""
        source_length, layers = cache
        slots = layers[0][0][0].shape[2]
        bias = self.block[0].layer[0].SelfAttention.relative_attention_bias(new.positions, slots)
        written: list[tuple[LayerCache, LayerCache]] = []
        for block, (text, source) in zip(self.block, layers, strict=True):
            own, cross, mlp = block.layer
            x, text = own.write(x, new, text, bias, last=len(written) == len(layers) - 1)
            x = mlp(cross(x, source, source_length))
            written.append((text, source))
        return self.final_layer_norm(x), (source_length, tuple(written))


class Block(nnx.Module):
    """The parts of a block, each applied to the norm of its input and added to it."""

    def __init__(self, parts: list[nnx.Module]) -> None:
        self.layer = nnx.List(parts)


class SelfAttention(nnx.Module):
    """Attention of the places of a source to each other, or of tokens to those before them."""

    def __init__(self, config: Any, *, bias: bool, causal: bool) -> None:
        self.layer_norm = RMSNorm(config.d_model, config.layer_norm_epsilon)
        self.SelfAttention = Attention(config)
        if bias:  # the first layer has the table of all
            self.SelfAttention.relative_attention_bias = RelativeBias(config, causal=causal)

    def read(self, x: jax.Array, length: jax.Array, bias: jax.Array) -> jax.Array:
        """Map the places of a source [B, N, D] to [B, N, D]; places from `length` on are not seen."""
        normed = self.layer_norm(x)
        query, layer = self.SelfAttention.query(normed), self.SelfAttention.keys_values(normed)
        mixed = attention(query, layer, _last(length), scale=1.0, bias=bias)
        return self.SelfAttention.o(mixed, residual=x)

    def write(
        self, x: jax.Array, new: NewTokens, layer: LayerCache, bias: jax.Array, *, last: bool
    ) -> tuple[jax.Array, LayerCache]:
        """Map new tokens [B, T, D] to [B, T, D], or [B, 1, D] if `last`; return it and the cache."""
        kept = new.wanted(x) if last else x
        normed, own = self.layer_norm(x), self.SelfAttention
        query, keys, values = own.query(normed), own.heads(own.k(normed)), own.heads(own.v(normed))
        mixed, layer = new.attend(query, keys, values, layer, 1.0, last=last, bias=bias)
        return own.o(mixed, residual=kept), layer


class CrossAttention(nnx.Module):
    """Attention of tokens to the places of a source."""

    def __init__(self, config: Any) -> None:
        self.layer_norm = RMSNorm(config.d_model, config.layer_norm_epsilon)
        self.EncDecAttention = Attention(config)

    def __call__(self, x: jax.Array, source: LayerCache, length: jax.Array) -> jax.Array:
        """Map x [B, T, D] to [B, T, D]; places of the source from `length` on are not seen."""
        query = self.EncDecAttention.query(self.layer_norm(x))
        mixed = attention(query, source, _last(length), scale=1.0)
        return self.EncDecAttention.o(mixed, residual=x)


class Attention(nnx.Module):
    """The projections of multi-head attention. Scores are not scaled."""

    def __init__(self, config: Any) -> None:
        inner = config.num_heads * config.d_kv
        self.num_heads = config.num_heads
        self.q = Linear(config.d_model, inner, bias=False)
        self.k = Linear(config.d_model, inner, bias=False)
        self.v = Linear(config.d_model, inner, bias=False)
        self.o = Linear(inner, config.d_model, bias=False)

    def query(self, x: jax.Array) -> jax.Array:
        """Map x [B, T, D] to queries [B, T, K, H]."""
        return self.heads(self.q(x))

    def keys_values(self, x: jax.Array) -> LayerCache:
        """Map x [B, N, D] to keys and values as a cache has them, each [B, K, N, H]."""
        return self.heads(self.k(x)).swapaxes(1, 2), self.heads(self.v(x)).swapaxes(1, 2)

    def heads(self, x: jax.Array) -> jax.Array:
        """Map a projection [B, T, K * H] to its heads [B, T, K, H]."""
        return x.reshape(*x.shape[:2], self.num_heads, -1)


class RelativeBias(nnx.Module):
    """A table of each head's bias for each bucket of distances; it is float32 in every stored dtype."""

    def __init__(self, config: Any, *, causal: bool) -> None:
        self.weight = nnx.Param(
            jnp.zeros((config.relative_attention_num_buckets, config.num_heads))
        )
        self.farthest: int = config.relative_attention_max_distance
        self.causal = causal

    def __call__(self, positions: jax.Array, slots: int) -> jax.Array:
        """Return the bias of the scores of queries at int32 [B, T] with all slots: [B, T, K, S]."""
        far = min(
            self.farthest, slots
        )  # no two places are farther apart, or all those share a bucket
        count = self.weight.shape[0]
        index = buckets(np.arange(-far, far + 1), count, self.farthest, causal=self.causal)
        of_distance = self.weight[...][index]
        distance = jnp.arange(slots) - positions[..., None]
        bias: jax.Array = of_distance[jnp.clip(distance, -far, far) + far]
        return bias.swapaxes(2, 3)


def buckets(
    distance: np.ndarray[Any, Any], count: int, farthest: int, *, causal: bool
) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Return the bucket of each distance: Raffel et al. 2019, section 2.1, as modeling_t5.py computes it.

    Half of the buckets of a direction have one distance each, the others are logarithmic. Powers of 2 can lie
    exactly at a border, where rounding decides. So the steps are torch's, in float32, with a logarithm that
    is the same on every machine: the one of float64, rounded.

    Args:
        distance: integers, the position that is seen minus the one that sees it.
        count: the number of buckets.
        farthest: the distance from which on all share a bucket.
        causal: whether all buckets are for positions before; otherwise half of them are for those after.

    Returns:
        int32, 0 to count - 1, in the shape of distance.
    """
    first = np.zeros_like(distance)
    if causal:
        distance = np.maximum(-distance, 0)
    else:
        count //= 2
        first, distance = np.where(distance > 0, count, 0), np.abs(distance)
    exact = count // 2
    ratio = np.maximum(distance, exact).astype(np.float32) / np.float32(exact)
    logarithm = np.log(ratio.astype(np.float64)).astype(np.float32)
    scaled = logarithm / np.float32(math.log(farthest / exact)) * np.float32(count - exact)
    large = np.minimum(exact + scaled.astype(np.int32), count - 1)
    return np.asarray(first + np.where(distance < exact, distance, large), np.int32)


class MLP(nnx.Module):
    """Two layers with an activation between them, which a third multiplies in T5 1.1."""

    def __init__(self, config: Any) -> None:
        self.layer_norm = RMSNorm(config.d_model, config.layer_norm_epsilon)
        self.DenseReluDense = (GatedMLP if config.is_gated_act else PlainMLP)(config)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map x [B, T, D] to [B, T, D]."""
        return self.DenseReluDense(self.layer_norm(x), x)


class PlainMLP(nnx.Module):
    """The MLP of T5 1.0."""

    def __init__(self, config: Any) -> None:
        self.wi = Linear(config.d_model, config.d_ff, bias=False)
        self.wo = Linear(config.d_ff, config.d_model, bias=False)
        self.activation: str = config.dense_act_fn

    def __call__(self, x: jax.Array, residual: jax.Array) -> jax.Array:
        """Map x [B, T, D] to [B, T, D], plus a residual."""
        return self.wo(self.wi(x, activation=self.activation), residual=residual)


class GatedMLP(nnx.Module):
    """The MLP of T5 1.1."""

    def __init__(self, config: Any) -> None:
        self.wi_0 = Linear(config.d_model, config.d_ff, bias=False)
        self.wi_1 = Linear(config.d_model, config.d_ff, bias=False)
        self.wo = Linear(config.d_ff, config.d_model, bias=False)
        self.activation: str = config.dense_act_fn

    def __call__(self, x: jax.Array, residual: jax.Array) -> jax.Array:
        """Map x [B, T, D] to [B, T, D], plus a residual."""
        return self.wo(gated(self.wi_0, self.wi_1, x, self.activation), residual=residual)


def _last(length: jax.Array) -> jax.Array:
    """Return the last valid place of each source, [B, 1]. An idle row of length 0 has one, not NaN."""
    return jnp.maximum(length - 1, 0)[:, None]
