"""Llama: rotary positions, RMSNorm, grouped-query attention, gated MLP; Llama 1 to 3 and their kin.

Sources: Touvron et al. 2023 (Llama 2), arXiv 2307.09288; Grattafiori et al. 2024 (Llama 3),
arXiv 2407.21783; Su et al. 2021 (RoFormer), arXiv 2104.09864; Zhang and Sennrich 2019 (RMSNorm);
Ainslie et al. 2023 (grouped queries); transformers 5, models/llama/modeling_llama.py, with which the
logits agree.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from prejit.compiler.models import rope
from prejit.compiler.models.decoder import (
    ACTIVATIONS,
    DecoderConfig,
    Embedding,
    KVCache,
    LayerCache,
    Linear,
    Naming,
    NewTokens,
    Split,
    attention,
    require,
    split,
    unsupported,
)

NAMING = Naming(
    prefix="model.",
    head="lm_head.weight",
    embedding="model.embed_tokens.weight",
    buffers=(".rotary_emb.inv_freq",),
)

SPLIT = Split(
    outputs=("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"),
    inputs=("o_proj", "down_proj"),
    vocabulary=("embed_tokens", "lm_head"),
)


def describe(config: Any) -> DecoderConfig:
    """The sizes of a Llama.

    Raises:
        CheckpointError: its configuration asks for something that is not built here.
    """
    require(config, "hidden_act", config.hidden_act, ACTIVATIONS)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % kv_heads:
        raise unsupported(
            config,
            f"num_key_value_heads: expected a divisor of num_attention_heads = {heads}, "
            f"found {kv_heads}",
        )
    rope.frequencies(config)
    return DecoderConfig(
        family="llama",
        vocab_size=config.vocab_size,
        num_layers=config.num_hidden_layers,
        num_kv_heads=kv_heads,
        head_size=config.head_dim,
        cache_dtype="float32",
        max_positions=config.max_position_embeddings,
    )


class Llama(nnx.Module):
    """A Llama with its language-model head. Parameters have the names of the published tensors."""

    def __init__(self, config: Any) -> None:
        self.model = Transformer(config)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)

    def __call__(
        self, tokens: jax.Array, start: jax.Array, length: jax.Array, cache: KVCache
    ) -> tuple[jax.Array, KVCache]:
        """See Decoder."""
        new = NewTokens(start, length, tokens.shape[1])
        x, cache = self.model(tokens, new, cache)
        head = self.lm_head if hasattr(self, "lm_head") else self.model.embed_tokens.logits
        return head(x[:, 0]), cache


class Transformer(nnx.Module):
    """All but the head."""

    def __init__(self, config: Any) -> None:
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nnx.List([Block(config) for _ in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config)
        self.rotary = rope.frequencies(config)

    def __call__(
        self, tokens: jax.Array, new: NewTokens, cache: KVCache
    ) -> tuple[jax.Array, KVCache]:
        """Tokens [B, T] to the hidden state [B, 1, D] of the last token of each row."""
        x = split(self.embed_tokens(tokens), "data")
        turns = rope.turns(self.rotary, new.positions)
        layers: list[LayerCache] = []
        for block, layer in zip(self.layers, cache, strict=True):
            x, layer = block(x, turns, new, layer, last=len(layers) == len(cache) - 1)
            layers.append(layer)
        return self.norm(x), tuple(layers)


class Block(nnx.Module):
    """Attention and MLP, each on the normalized sum of what came before."""

    def __init__(self, config: Any) -> None:
        self.input_layernorm = RMSNorm(config)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config)
        self.mlp = MLP(config)

    def __call__(
        self, x: jax.Array, turns: rope.Turns, new: NewTokens, layer: LayerCache, *, last: bool
    ) -> tuple[jax.Array, LayerCache]:
        """X [B, T, D] to [B, T, D]; to [B, 1, D] in the last block, whose other results nobody reads."""
        query, keys, values = self.self_attn.project(self.input_layernorm(x), turns)
        layer = new.write(layer, keys, values)
        positions = new.positions
        if last:
            x, query, positions = map(new.last, (x, query, positions))
        x = x + self.self_attn(query, layer, positions)
        return x + self.mlp(self.post_attention_layernorm(x)), layer


class Attention(nnx.Module):
    """Grouped-query self-attention over the cache, with rotary positions."""

    def __init__(self, config: Any) -> None:
        width, bias = config.hidden_size, config.attention_bias
        self.head_size = config.head_dim
        queries = config.num_attention_heads * self.head_size
        keys = config.num_key_value_heads * self.head_size
        self.q_proj = Linear(width, queries, bias=bias)
        self.k_proj = Linear(width, keys, bias=bias)
        self.v_proj = Linear(width, keys, bias=bias)
        self.o_proj = Linear(queries, width, bias=bias)

    def project(self, x: jax.Array, turns: rope.Turns) -> tuple[jax.Array, jax.Array, jax.Array]:
        """X [B, T, D] to query [B, T, N, H], keys and values [B, T, K, H]; the first two turned."""
        query, keys, values = (
            projection(x).reshape(*x.shape[:2], -1, self.head_size)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        return rope.turn(query, turns), rope.turn(keys, turns), values

    def __call__(self, query: jax.Array, layer: LayerCache, positions: jax.Array) -> jax.Array:
        """Query [B, T, N, H] to [B, T, D]."""
        return self.o_proj(attention(query, layer, positions, self.head_size**-0.5))


class MLP(nnx.Module):
    """A linear layer, gated by the activation of another (Shazeer 2020), and one back to D."""

    def __init__(self, config: Any) -> None:
        width, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = Linear(width, inner, bias=bias)
        self.up_proj = Linear(width, inner, bias=bias)
        self.down_proj = Linear(inner, width, bias=bias)
        self.activation = config.hidden_act

    def __call__(self, x: jax.Array) -> jax.Array:
        """X [B, T, D] to [B, T, D]."""
        return self.down_proj(ACTIVATIONS[self.activation](self.gate_proj(x)) * self.up_proj(x))


class RMSNorm(nnx.Module):
    """Division by the root mean square along D, then a scale."""

    def __init__(self, config: Any) -> None:
        self.weight = nnx.Param(jnp.ones(config.hidden_size))
        self.epsilon = config.rms_norm_eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """X [B, T, D] to [B, T, D]."""
        mean_square = jnp.square(x).mean(-1, keepdims=True)
        return x * lax.rsqrt(mean_square + self.epsilon) * self.weight[...]
