"""The decoder that families with rotary positions share: attention, gated MLP, block and whole model.

The modules are those of Llama. A family is a small file that holds what differs in it. It passes its
differences to `build_llama`; a family with modules of its own builds its blocks and passes them to
RotaryDecoder. Parameters have the names of the published tensors. These are the same in all of these
families, and so are NAMING and SPLIT.

Sources: Su et al. 2021 (RoFormer), arXiv 2104.09864; Zhang and Sennrich 2019 (RMSNorm); Shazeer 2020 (gated
MLP), arXiv 2002.05202; Ainslie et al. 2023 (grouped queries), arXiv 2305.13245.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from prejit.compiler.models.layers import rope
from prejit.compiler.models.layers.attention import NewTokens
from prejit.compiler.models.layers.layer_config import (
    DecoderConfig,
    KVCache,
    LayerCache,
    Naming,
    Split,
    empty_cache,
    require,
    unsupported,
)
from prejit.compiler.models.layers.linear import ACTIVATIONS, Embedding, Linear, gated, split
from prejit.compiler.models.layers.norms import RMSNorm

NAMING = Naming(
    prefix="model.",
    head="lm_head.weight",
    embedding="model.embed_tokens.weight",
    buffers=(".rotary_emb.inv_freq",),
)

SPLIT = Split(
    outputs=("q_proj", "k_proj", "v_proj", "qkv_proj", "gate_proj", "up_proj", "gate_up_proj"),
    inputs=("o_proj", "down_proj"),
    vocabulary=("embed_tokens", "lm_head"),
)

Turns = Mapping[rope.Rotary, rope.Turns]
"""Cosines and sines for each way in which layers of the model turn their heads."""


@dataclass(frozen=True)
class Heads:
    """The heads of a layer.

    Attributes:
        queries: N.
        keys: K, which divides N.
        size: H.
        rotary: how they turn with the position.
        scale: factor of the scores.
        window: number of tokens that each one sees, itself included; None for all up to its own.
        cap: soft bound of the scores; None for no bound.
    """

    queries: int
    keys: int
    size: int
    rotary: rope.Rotary
    scale: float
    window: int | None = None
    cap: float | None = None

    @classmethod
    def of(cls, config: Any, rotary: rope.Rotary, window: int | None = None) -> Heads:
        """Return the heads of most families: scores are scaled by 1 / sqrt(H) and have no bound."""
        size = head_size(config)
        number = config.num_attention_heads, config.num_key_value_heads
        return cls(*number, size, rotary, size**-0.5, window)

    def attend(
        self,
        query: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        turns: Turns,
        new: NewTokens,
        layer: LayerCache,
        *,
        last: bool,
    ) -> tuple[jax.Array, LayerCache]:
        """Write the new tokens into the cache and attend to it.

        Args:
            query: float32 [B, T, N, H], not turned yet.
            keys: float32 [B, T, K, H], not turned yet.
            values: float32 [B, T, K, H].
            turns: cosines and sines of the new positions.
            new: the positions of the new tokens.
            layer: the cache.
            last: whether this is the last layer, which computes only what results need.

        Returns:
            float32 [B, T, N * H], or [B, 1, N * H] in the last layer; the cache.
        """
        query, keys = (rope.turn(x, turns[self.rotary]) for x in (query, keys))
        return new.attend(
            *(query, keys, values, layer, self.scale),
            last=last,
            window=self.window,
            cap=self.cap,
        )


class SelfAttention(Protocol):
    """An attention with its projections, as a block calls it."""

    heads: Heads

    def __call__(
        self,
        x: jax.Array,
        turns: Turns,
        new: NewTokens,
        layer: LayerCache,
        *,
        last: bool,
        residual: jax.Array | None = None,
    ) -> tuple[jax.Array, LayerCache]:
        """Map x [B, T, D] to [B, T, D], or [B, 1, D] if `last`, plus a residual; return it and the cache."""
        ...


class RotaryBlock(Protocol):
    """A block, as RotaryDecoder calls it."""

    self_attn: SelfAttention

    def __call__(
        self, x: jax.Array, turns: Turns, new: NewTokens, layer: LayerCache, *, last: bool
    ) -> tuple[jax.Array, LayerCache]:
        """Map x [B, T, D] to [B, T, D], or [B, 1, D] if `last`; return it and the cache."""
        ...


class Attention(nnx.Module):
    """Grouped-query self-attention over the cache.

    `head_norm` makes the norms of queries and keys along the head, from the head size.
    """

    def __init__(
        self,
        width: int,
        heads: Heads,
        *,
        bias: bool = False,
        output_bias: bool = False,
        head_norm: Callable[[int], RMSNorm] | None = None,
    ) -> None:
        self.heads = heads
        queries, keys = heads.queries * heads.size, heads.keys * heads.size
        self.q_proj = Linear(width, queries, bias=bias)
        self.k_proj = Linear(width, keys, bias=bias)
        self.v_proj = Linear(width, keys, bias=bias)
        self.o_proj = Linear(queries, width, bias=output_bias)
        if head_norm is not None:
            self.q_norm = head_norm(heads.size)
            self.k_norm = head_norm(heads.size)

    def __call__(
        self,
        x: jax.Array,
        turns: Turns,
        new: NewTokens,
        layer: LayerCache,
        *,
        last: bool,
        residual: jax.Array | None = None,
    ) -> tuple[jax.Array, LayerCache]:
        """See SelfAttention."""
        query, keys, values = (
            projection(x).reshape(*x.shape[:2], -1, self.heads.size)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if hasattr(self, "q_norm"):
            query, keys = self.q_norm(query), self.k_norm(keys)
        mixed, layer = self.heads.attend(query, keys, values, turns, new, layer, last=last)
        return self.o_proj(mixed, residual=residual), layer


class GatedMLP(nnx.Module):
    """A linear layer, gated by the activation of another, and a third layer back to D."""

    def __init__(self, width: int, inner: int, activation: str, *, bias: bool = False) -> None:
        self.gate_proj = Linear(width, inner, bias=bias)
        self.up_proj = Linear(width, inner, bias=bias)
        self.down_proj = Linear(inner, width, bias=bias)
        self.activation = activation

    def __call__(self, x: jax.Array, residual: jax.Array | None = None) -> jax.Array:
        """Map x [B, T, D] to [B, T, D], plus a residual."""
        inner = gated(self.gate_proj, self.up_proj, x, self.activation)
        return self.down_proj(inner, residual=residual)


class Block(nnx.Module):
    """Attention and MLP, each applied to the norm of its input and added to it."""

    def __init__(
        self,
        config: Any,
        self_attn: SelfAttention,
        mlp: Callable[[jax.Array, jax.Array], jax.Array],
    ) -> None:
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = self_attn
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = mlp

    def __call__(
        self, x: jax.Array, turns: Turns, new: NewTokens, layer: LayerCache, *, last: bool
    ) -> tuple[jax.Array, LayerCache]:
        """See RotaryBlock."""
        kept = new.wanted(x) if last else x
        normed = self.input_layernorm(x)
        x, layer = self.self_attn(normed, turns, new, layer, last=last, residual=kept)
        return self.mlp(self.post_attention_layernorm(x), x), layer


class RotaryDecoder(nnx.Module):
    """A decoder with its language-model head."""

    def __init__(
        self,
        config: Any,
        blocks: Sequence[RotaryBlock],
        *,
        norm: RMSNorm | None = None,
        embedding_scale: float | None = None,
        logit_cap: float | None = None,
    ) -> None:
        """Build a model from its blocks.

        Args:
            config: transformers' configuration: sizes, and whether the head is tied.
            blocks: the L blocks.
            norm: the norm after the last block; None for Llama's RMSNorm.
            embedding_scale: factor of the embeddings; None for 1.
            logit_cap: soft bound of the logits; None for no bound.
        """
        norm = norm or RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.vocab_size: int = config.vocab_size
        self.max_positions: int | None = config.max_position_embeddings
        self.model = Transformer(config, blocks, norm, embedding_scale)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.logit_cap = logit_cap

    def make_cache(self, rows: int, positions: int, dtype: str) -> KVCache:
        """See DecoderModel."""
        heads = self.model.layers[0].self_attn.heads
        return empty_cache(len(self.model.layers), rows, heads.keys, positions, heads.size, dtype)

    def __call__(
        self,
        tokens: jax.Array,
        start: jax.Array,
        length: jax.Array,
        cache: KVCache,
        *,
        every: bool = False,
    ) -> tuple[jax.Array, KVCache]:
        """See DecoderModel."""
        new = NewTokens(start, length, tokens.shape[1], every)
        x, cache = self.model(tokens, new, cache)
        head = self.lm_head if hasattr(self, "lm_head") else self.model.embed_tokens.logits
        logits = head(x if every else x[:, 0])
        if self.logit_cap is not None:
            logits = self.logit_cap * jnp.tanh(logits / self.logit_cap)
        return logits, cache


class Transformer(nnx.Module):
    """The decoder without its head: an embedding, blocks and a norm."""

    def __init__(
        self,
        config: Any,
        blocks: Sequence[RotaryBlock],
        norm: RMSNorm,
        embedding_scale: float | None,
    ) -> None:
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nnx.List(blocks)
        self.norm = norm
        self.embedding_scale = embedding_scale

    def __call__(
        self, tokens: jax.Array, new: NewTokens, cache: KVCache
    ) -> tuple[jax.Array, KVCache]:
        """Return the hidden states that results need, [B, 1, D] or [B, T, D], and the cache."""
        x = self.embed_tokens(tokens)
        if self.embedding_scale is not None:
            x = x * self.embedding_scale
        x = split(x, "data")
        ways = dict.fromkeys(block.self_attn.heads.rotary for block in self.layers)
        turns = {rotary: rope.turns(rotary, new.positions) for rotary in ways}
        layers: list[LayerCache] = []
        for block, layer in zip(self.layers, cache, strict=True):
            x, layer = block(x, turns, new, layer, last=len(layers) == len(cache) - 1)
            layers.append(layer)
        return self.norm(x), tuple(layers)


def describe(config: Any, activation: str = "hidden_act") -> DecoderConfig:
    """Return the sizes of a model.

    Args:
        config: transformers' configuration.
        activation: the key of the MLP's activation.

    Raises:
        CheckpointError: a setting is not supported.
    """
    require(config, activation, getattr(config, activation), ACTIVATIONS)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % kv_heads:
        raise unsupported(
            config,
            f"num_key_value_heads: expected a divisor of num_attention_heads = {heads}, "
            f"found {kv_heads}",
        )
    return DecoderConfig(
        family=config.model_type,
        vocab_size=config.vocab_size,
        cache_dtype="float32",
        max_positions=config.max_position_embeddings,
    )


def describe_llama(config: Any, *, partial: bool = False) -> DecoderConfig:
    """Return the sizes of a model whose layers all turn their heads in the same way.

    Args:
        config: transformers' configuration.
        partial: whether it may turn only a part of each head.

    Raises:
        CheckpointError: a setting is not supported.
    """
    rope.frequencies(config, head_size(config), partial=partial)
    return describe(config)


def build_llama(
    config: Any,
    context: int | None,
    windows: Sequence[int | None] | None = None,
    *,
    bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    head_norm: Callable[[int], RMSNorm] | None = None,
) -> RotaryDecoder:
    """Return a model of Llama's own modules, with what differs in a family.

    Args:
        config: transformers' configuration.
        context: the longest context of its programs; None for the longest that it was made for.
        windows: the window of each layer; None: no layer has one.
        bias: whether queries, keys and values have biases.
        output_bias: whether the output of attention has one.
        mlp_bias: whether the layers of the MLP have them.
        head_norm: see Attention.
    """
    rotary = rope.frequencies(config, head_size(config), context=context)
    width, inner = config.hidden_size, config.intermediate_size

    def block(window: int | None) -> Block:
        heads = Heads.of(config, rotary, window)
        attention = Attention(width, heads, bias=bias, output_bias=output_bias, head_norm=head_norm)
        return Block(config, attention, GatedMLP(width, inner, config.hidden_act, bias=mlp_bias))

    return RotaryDecoder(config, list(map(block, windows or [None] * config.num_hidden_layers)))


def head_size(config: Any) -> int:
    """Return H: `head_dim` of the configuration, or the width divided by the number of heads."""
    size: int | None = getattr(config, "head_dim", None)
    return size or config.hidden_size // config.num_attention_heads


def window(config: Any) -> int | None:
    """Return the `sliding_window` of a configuration.

    Raises:
        CheckpointError: the window is not positive.
    """
    size: int | None = config.sliding_window
    if size is not None and size < 1:
        raise unsupported(config, f"sliding_window: expected null or at least 1, found {size}")
    return size


def windows(config: Any) -> list[int | None]:
    """Return the window of each layer, by `layer_types`.

    Raises:
        CheckpointError: a kind of layer is not supported, or a sliding layer has no window.
    """
    kinds = config.layer_types
    for kind in kinds:
        require(config, "layer_types", kind, ["full_attention", "sliding_attention"])
    size = window(config)
    if size is None and "sliding_attention" in kinds:
        raise unsupported(
            config,
            'sliding_window: expected a number, as layer_types has "sliding_attention", found null',
        )
    return [size if kind == "sliding_attention" else None for kind in kinds]
