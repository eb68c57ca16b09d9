"""GPT-2: learned positions, pre-LN blocks, fused query/key/value projection, GELU, tied head.

Sources: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"; transformers 5,
models/gpt2/modeling_gpt2.py, with which the logits agree. `reorder_and_upcast_attn` changes nothing
in float32, dropout nothing at inference.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from prejit.compiler.models.layers import product_forms
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
from prejit.compiler.models.layers.linear import ACTIVATIONS, Embedding, Linear, split
from prejit.compiler.models.layers.norms import LayerNorm

NAMING = Naming(
    prefix="transformer.",
    head="lm_head.weight",
    embedding="transformer.wte.weight",
    # transformers' Conv1D stores (in, out)
    in_out=(".c_attn.weight", ".c_proj.weight", ".c_fc.weight"),
    buffers=(".attn.bias", ".attn.masked_bias"),
)

SPLIT = Split(outputs=("c_attn", "c_fc"), inputs=("c_proj",), vocabulary=("wte", "lm_head"))


def describe(config: Any) -> DecoderConfig:
    """Return the sizes of a GPT-2.

    Raises:
        CheckpointError: its configuration asks for something that is not built here.
    """
    require(config, "activation_function", config.activation_function, ACTIVATIONS)
    require(config, "add_cross_attention", config.add_cross_attention, [False])
    if config.n_embd % config.n_head:
        raise unsupported(
            config,
            f"n_embd: expected a multiple of n_head = {config.n_head}, found {config.n_embd}",
        )
    return DecoderConfig(
        family="gpt2",
        vocab_size=config.vocab_size,
        cache_dtype="float32",
        max_positions=config.n_positions,
    )


def build(config: Any, context: int | None) -> GPT2:
    """Return a GPT-2, which is the same for every context."""
    return GPT2(config)


class GPT2(nnx.Module):
    """A GPT-2 with its language-model head. Parameters have the names of the published tensors."""

    def __init__(self, config: Any) -> None:
        self.vocab_size: int = config.vocab_size
        self.max_positions: int | None = config.n_positions
        self.transformer = Transformer(config)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.n_embd, config.vocab_size, bias=False)

    def make_cache(self, rows: int, positions: int, dtype: str) -> KVCache:
        """See DecoderModel."""
        blocks = self.transformer.h
        heads, size = blocks[0].attn.num_heads, blocks[0].attn.head_size
        return empty_cache(len(blocks), rows, heads, positions, size, dtype)

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
        x, cache = self.transformer(tokens, new, cache)
        head = self.lm_head if hasattr(self, "lm_head") else self.transformer.wte.logits
        return head(x if every else x[:, 0]), cache


class Transformer(nnx.Module):
    """The decoder without its head."""

    def __init__(self, config: Any) -> None:
        self.wte = Embedding(config.vocab_size, config.n_embd)
        self.wpe = Embedding(config.n_positions, config.n_embd)
        self.h = nnx.List([Block(config, layer) for layer in range(config.n_layer)])
        self.ln_f = LayerNorm(config.n_embd, config.layer_norm_epsilon)

    def __call__(
        self, tokens: jax.Array, new: NewTokens, cache: KVCache
    ) -> tuple[jax.Array, KVCache]:
        """Return the hidden states that results need, [B, 1, D] or [B, T, D], and the cache."""
        x = split(self.wte(tokens) + self.wpe(new.positions), "data")
        layers: list[LayerCache] = []
        for block, layer in zip(self.h, cache, strict=True):
            x, layer = block(x, new, layer, last=len(layers) == len(cache) - 1)
            layers.append(layer)
        return self.ln_f(x), tuple(layers)


class Block(nnx.Module):
    """Attention and MLP, each applied to the norm of its input and added to it."""

    def __init__(self, config: Any, layer: int) -> None:
        self.ln_1 = LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.attn = Attention(config, layer)
        self.ln_2 = LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.mlp = MLP(config)

    def __call__(
        self, x: jax.Array, new: NewTokens, layer: LayerCache, *, last: bool
    ) -> tuple[jax.Array, LayerCache]:
        """Map x [B, T, D] to [B, T, D], or [B, 1, D] in the last block; return it and the cache."""
        kept = new.wanted(x) if last else x
        x, layer = self.attn(self.ln_1(x), new, layer, kept, last=last)
        return self.mlp(self.ln_2(x), x), layer


class Attention(nnx.Module):
    """Multi-head self-attention over the cache."""

    def __init__(self, config: Any, layer: int) -> None:
        self.num_heads = config.n_head
        self.c_attn = Linear(config.n_embd, 3 * config.n_embd, bias=True)
        self.c_proj = Linear(config.n_embd, config.n_embd, bias=True)
        self.head_size = config.n_embd // config.n_head
        self.scale = self.head_size**-0.5 if config.scale_attn_weights else 1.0
        if config.scale_attn_by_inverse_layer_idx:
            self.scale /= layer + 1

    def _project(self, x: jax.Array) -> tuple[jax.Array, ...]:
        """Map x [B, T, D] to query, keys and values, each [B, T, N, H].

        On a mesh a device's part of the outputs is not query, keys and values of its own heads. So the
        outputs are gathered, [B, T, 3D], once: without these three steps XLA sends parts around, in 9
        exchanges a layer for 8 devices.
        """
        outputs = split(split(self.c_attn(x), "data", None, "tensor"), "data")
        parts = (split(part, "data") for part in jnp.split(outputs, 3, axis=-1))
        heads = (part.reshape(*x.shape[:2], self.num_heads, -1) for part in parts)
        return tuple(split(part, "data", None, "tensor") for part in heads)

    def __call__(
        self, x: jax.Array, new: NewTokens, layer: LayerCache, residual: jax.Array, *, last: bool
    ) -> tuple[jax.Array, LayerCache]:
        """Map x [B, T, D] to [B, T, D], or [B, 1, D] if `last`, plus a residual; return it and the cache."""
        if product_forms.has_kernels():
            packed = self.c_attn(x).reshape(*x.shape[:2], 3 * self.num_heads, -1)
            mixed, layer = new.attend_packed(packed, self.num_heads, layer, self.scale, last=last)
        else:
            query, keys, values = self._project(x)
            mixed, layer = new.attend(query, keys, values, layer, self.scale, last=last)
        return self.c_proj(mixed, residual=residual), layer


class MLP(nnx.Module):
    """Two layers with an activation between them."""

    def __init__(self, config: Any) -> None:
        inner = config.n_inner if config.n_inner is not None else 4 * config.n_embd
        self.c_fc = Linear(config.n_embd, inner, bias=True)
        self.c_proj = Linear(inner, config.n_embd, bias=True)
        self.activation = config.activation_function

    def __call__(self, x: jax.Array, residual: jax.Array) -> jax.Array:
        """Map x [B, T, D] to [B, T, D], plus a residual."""
        return self.c_proj(self.c_fc(x, activation=self.activation), residual=residual)
