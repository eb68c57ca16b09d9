"""DeepSeek's latent attention: the cache holds a vector for each position, from which heads make their keys.

A position is kept as a latent c of `kv_lora_rank` numbers, and `qk_rope_head_dim` numbers that turn. Keys of
a head are linear in c, so its query is mapped to the space of c instead, and all heads attend to the same
vectors: a query q sees c as q W_k c, and the values W_v c are made after their sum. A cache has
2 (rank + turned) numbers for a position, where keys and values of all heads are many times that.

Source: DeepSeek-AI 2024, arXiv 2405.04434, sections 2.1.2 and C. Shapes: R rank, P the part that turns.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from prejit.compiler.base.stored_dtypes import stored_as
from prejit.compiler.models.layers import int4_words, rope
from prejit.compiler.models.layers.attention import LayerCache, NewTokens
from prejit.compiler.models.layers.linear import Linear, RMSNorm

KEYS = (
    *("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    "attention_bias",
)
"""The keys of config.json that it reads."""
_EPSILON = 1e-6
"""The epsilon of norms of latents is a constant in the code of the reference, not a setting."""


def scale(config: Any) -> float:
    """Return the factor of scores, which YaRN makes larger."""
    parameters = config.rope_parameters
    factor: float = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    weight, longer = parameters.get("mscale_all_dim"), parameters.get("factor")
    if parameters.get("rope_type") == "default" or not weight or not longer or longer <= 1:
        return factor
    return factor * float((0.1 * weight * math.log(longer) + 1) ** 2)


class LatentAttention(nnx.Module):
    """Attention to latents, without the last product."""

    def __init__(self, config: Any) -> None:
        width, bias, queries = config.hidden_size, config.attention_bias, config.num_attention_heads
        self.heads: int = queries
        self.kept: int = config.qk_nope_head_dim
        self.rank: int = config.kv_lora_rank
        size, rank = self.kept + config.qk_rope_head_dim, config.q_lora_rank
        if rank is None:
            self.q_proj = Linear(width, queries * size, bias=False)
        else:
            self.q_a_proj = Linear(width, rank, bias=bias)
            self.q_a_layernorm = RMSNorm(rank, _EPSILON)
            self.q_b_proj = Linear(rank, queries * size, bias=False)
        self.kv_a_proj_with_mqa = Linear(width, self.rank + config.qk_rope_head_dim, bias=bias)
        self.kv_a_layernorm = RMSNorm(self.rank, _EPSILON)
        of_heads = queries * (self.kept + config.v_head_dim)
        self.kv_b_proj = Linear(self.rank, of_heads, bias=False, in_out=False)

    def __call__(
        self,
        x: jax.Array,
        turns: rope.Turns,
        new: NewTokens,
        layer: LayerCache,
        factor: float,
        *,
        last: bool,
    ) -> tuple[jax.Array, LayerCache]:
        """Map x [B, T, D] to [B, T, N * V], V of `v_head_dim`, or [B, 1, N * V] if `last`."""
        if hasattr(self, "q_proj"):
            query = self.q_proj(x)
        else:
            query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        query = query.reshape(*x.shape[:2], self.heads, -1)
        of_keys, of_values = self._by_head(x)
        latents, turned = jnp.split(self.kv_a_proj_with_mqa(x), [self.rank], axis=-1)
        turned = rope.turn(turned[:, :, None], turns)
        stored = jnp.concatenate([self.kv_a_layernorm(latents)[:, :, None], turned], axis=-1)
        mapped = jnp.einsum("btnh,nhr->btnr", query[..., : self.kept], of_keys)
        query = jnp.concatenate([mapped, rope.turn(query[..., self.kept :], turns)], axis=-1)
        mixed, layer = new.attend(query, stored, stored, layer, factor, last=last)
        mixed = mixed.reshape(*mixed.shape[:2], self.heads, -1)[..., : self.rank]
        values = jnp.einsum("btnr,nvr->btnv", mixed, of_values)
        return values.reshape(*values.shape[:2], -1), layer

    def _by_head(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the matrices of keys, float32 [N, H, R], and of values, [N, V, R]."""
        product = self.kv_b_proj
        # Without the barrier XLA widens them before the loop over decode steps.
        matrix, _ = lax.optimization_barrier((product.weight[...], x))
        scale = None if product.weight_scale is None else product.weight_scale[...]
        if scale is not None and stored_as(matrix.dtype).words is not None:
            tiles = int4_words.widened(matrix, scale)
            wide = tiles.swapaxes(1, 2).reshape(-1, self.rank)[: product.outputs]
        else:
            wide = matrix.astype(jnp.float32)
            wide = wide if scale is None else wide * scale[:, None]
        both = wide.reshape(self.heads, -1, self.rank)
        return both[:, : self.kept], both[:, self.kept :]
