"""A decoder of flax.nnx whose MLPs are mixtures of experts: each token goes through 2 of 8.

Sources: Shazeer et al. 2017, arXiv 1701.06538 (the gate); Jiang et al. 2024, "Mixtral of Experts", arXiv
2401.04088 (softmax over the chosen two); Su et al. 2021, arXiv 2104.09864 (rotary positions). No expert has a
limit of tokens, so what a row gets does not depend on other rows.

Shapes: B rows, T new tokens, S positions, H heads, K size of a head, D model width, E experts, F inner width,
V vocabulary.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

VOCABULARY, LAYERS, WIDTH, HEADS, EXPERTS, CHOSEN, INNER = 512, 4, 128, 4, 8, 2, 256
SIZE = WIDTH // HEADS

Layer = tuple[jax.Array, jax.Array]
"""Keys and values of one layer, [B, S, H, K] each."""


class Attention(nnx.Module):
    """Causal attention over a cache of keys and values."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.inputs = nnx.Linear(WIDTH, 3 * WIDTH, use_bias=False, rngs=rngs)
        self.outputs = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def __call__(
        self, x: jax.Array, start: jax.Array, length: jax.Array, layer: Layer
    ) -> tuple[jax.Array, Layer]:
        """Map x [B, T, D] to [B, T, D]; return it, and the cache with the valid tokens."""
        heads = self.inputs(x).reshape(*x.shape[:2], 3, HEADS, SIZE)
        positions = start[:, None] + jnp.arange(x.shape[1])
        query, keys = (rotated(heads[:, :, part], positions) for part in (0, 1))
        values = heads[:, :, 2]
        layer = (written(layer[0], keys, start, length), written(layer[1], values, start, length))
        keys, values = (array.astype(jnp.float32) for array in layer)
        scores = jnp.einsum("bthk,bshk->bhts", query, keys) * SIZE**-0.5
        visible = jnp.arange(keys.shape[1]) <= positions[:, None, :, None]
        weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf))
        return self.outputs(jnp.einsum("bhts,bshk->bthk", weights, values).reshape(x.shape)), layer


def rotated(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotate the halves of each head [B, T, H, K] by angles of the positions [B, T]."""
    angles = positions[..., None, None] * 1e4 ** -jnp.linspace(0, 1, SIZE // 2, endpoint=False)
    one, two = jnp.split(x, 2, axis=-1)
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    return jnp.concatenate([one * cos - two * sin, two * cos + one * sin], -1)


def written(array: jax.Array, new: jax.Array, start: jax.Array, length: jax.Array) -> jax.Array:
    """Return keys or values [B, S, H, K] with the valid new ones [B, T, H, K] at their positions."""
    token = jnp.arange(new.shape[1])
    # Padding gets a position after the last, and `drop` writes nothing there.
    places = jnp.where(token < length[:, None], start[:, None] + token, array.shape[1])
    rows = jnp.arange(len(new))[:, None]
    return array.at[rows, places].set(new.astype(array.dtype), mode="drop")


class Experts(nnx.Module):
    """An MLP of 8 experts of which the gate chooses 2 for each token."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        normal = jax.nn.initializers.lecun_normal(batch_axis=0)
        self.gate = nnx.Linear(WIDTH, EXPERTS, use_bias=False, rngs=rngs)
        self.up = nnx.Param(normal(rngs.params(), (EXPERTS, WIDTH, INNER)))
        self.down = nnx.Param(normal(rngs.params(), (EXPERTS, INNER, WIDTH)))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map x [B, T, D] to [B, T, D].

        All experts compute every token, and the gate's zeros drop most: simple, and right for few tokens.
        """
        best, which = jax.lax.top_k(self.gate(x), CHOSEN)  # [B, T, 2] each
        share = jax.nn.one_hot(which, EXPERTS) * jax.nn.softmax(best)[..., None]
        inner = jax.nn.silu(jnp.einsum("btd,edf->btef", x, self.up[...]))
        return jnp.einsum("btef,efd,bte->btd", inner, self.down[...], share.sum(2))


class Block(nnx.Module):
    """Attention and experts, each applied to the norm of its input and added to it."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.before_attention = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.attention = Attention(rngs)
        self.before_experts = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.experts = Experts(rngs)

    def __call__(
        self, x: jax.Array, start: jax.Array, length: jax.Array, layer: Layer
    ) -> tuple[jax.Array, Layer]:
        """Map x [B, T, D] to [B, T, D]; return it and the layer's cache."""
        change, layer = self.attention(self.before_attention(x), start, length, layer)
        x = x + change
        return x + self.experts(self.before_experts(x)), layer


class MixtureOfExperts(nnx.Module):
    """The model: an embedding, blocks and a head."""

    vocab_size = VOCABULARY
    max_positions = 2048

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embedding = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCABULARY, use_bias=False, rngs=rngs)

    def make_cache(self, rows: int, positions: int, dtype: str) -> list[Layer]:
        """Return zeros for the keys and values of each layer."""
        size = (rows, positions, HEADS, SIZE)
        return [(jnp.zeros(size, dtype), jnp.zeros(size, dtype)) for _ in self.blocks]

    def __call__(
        self,
        tokens: jax.Array,
        start: jax.Array,
        length: jax.Array,
        cache: list[Layer],
        *,
        every: bool = False,
    ) -> tuple[jax.Array, list[Layer]]:
        """Return float32 logits after the last valid token of each row, or after every one; and the cache."""
        x = self.embedding(tokens)
        after = []
        for block, layer in zip(self.blocks, cache, strict=True):
            x, layer = block(x, start, length, layer)
            after.append(layer)
        if not every:
            x = x[jnp.arange(len(x)), jnp.maximum(length - 1, 0)]
        return self.head(self.norm(x)), after


model = MixtureOfExperts(nnx.Rngs(0))
