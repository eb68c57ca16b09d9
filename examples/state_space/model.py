"""A selective state space model of Mamba's kind: a state of constant size in place of keys and values.

Source: Gu and Dao 2023, "Mamba", arXiv 2312.00752: the block of figure 3, the recurrence of algorithm 2. Each
block keeps the last inputs of its convolution and one state. A token that is padding, or a row that is idle,
changes neither.

B rows, T new tokens, D width, E inner width, N states of a channel, R rank of the step size, W width of the
convolution, V vocabulary. The sizes here are small: a few MB of random weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

VOCABULARY, LAYERS, WIDTH, INNER, STATES, RANK, KERNEL = 512, 4, 128, 256, 16, 8, 4

Cache = list[tuple[jax.Array, jax.Array]]
"""The last inputs of the convolution [B, W - 1, E] and the state [B, E, N] of each layer."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Block:
    """The parameters of a block."""

    norm: jax.Array  # [D]
    inputs: jax.Array  # [D, 2 E]: what enters the recurrence, and its gate
    kernel: jax.Array  # [W, E]: a causal convolution of each channel
    bias: jax.Array  # [E]
    select: jax.Array  # [E, R + 2 N]: step size, input and output of the state, from the token
    step: jax.Array  # [R, E]
    step_bias: jax.Array  # [E]
    decay: jax.Array  # [E, N]: the logarithm of -A
    skip: jax.Array  # [E]
    outputs: jax.Array  # [E, D]

    def __call__(
        self, x: jax.Array, length: jax.Array, last: jax.Array, state: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Map x [B, T, D] to [B, T, D]; return it, and the layer's cache after the valid tokens."""
        x, gate = jnp.split(normalized(x, self.norm) @ self.inputs, 2, axis=-1)
        x, last = self.convolved(x, length, last)
        x, state = self.recurrence(x, length, state)
        return (x * jax.nn.silu(gate)) @ self.outputs, (last, state)

    def convolved(
        self, x: jax.Array, length: jax.Array, last: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Mix each token with the W - 1 before it, which may be in the cache."""
        known = jnp.concatenate([last, x], 1)  # [B, W - 1 + T, E]
        mixed = sum(self.kernel[w] * known[:, w : w + x.shape[1]] for w in range(KERNEL))
        # The W - 1 inputs before the first padding: a row of length 0 keeps those that it had.
        places = length[:, None] + jnp.arange(KERNEL - 1)
        return jax.nn.silu(mixed + self.bias), jnp.take_along_axis(known, places[..., None], 1)

    def recurrence(
        self, x: jax.Array, length: jax.Array, state: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Run the state over the tokens: h = exp(d A) h + d B x, y = C h + D x, with d, B, C of the token."""
        step, into, out = jnp.split(x @ self.select, [RANK, RANK + STATES], axis=-1)
        step = jax.nn.softplus(step @ self.step + self.step_bias)  # d [B, T, E]
        # A step of size 0 leaves the state as it is: exp(0) h + 0.
        valid = jnp.arange(x.shape[1]) < length[:, None]
        step = jnp.where(valid[..., None], step, 0.0)
        keep = jnp.exp(-step[..., None] * jnp.exp(self.decay))  # [B, T, E, N]
        add = (step * x)[..., None] * into[:, :, None]

        def token(h: jax.Array, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
            keep, add, out = inputs
            h = keep * h + add
            return h, jnp.einsum("ben,bn->be", h, out)

        by_token = tuple(array.swapaxes(0, 1) for array in (keep, add, out))
        state, y = lax.scan(token, state, by_token)
        return y.swapaxes(0, 1) + self.skip * x, state


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StateSpaceModel:
    """The model. Its array leaves are its parameters; the embedding is also the head."""

    embedding: jax.Array  # [V, D]
    blocks: list[Block]
    norm: jax.Array  # [D]
    vocab_size = VOCABULARY
    max_positions = None  # its cache does not grow with the text

    def make_cache(self, rows: int, positions: int, dtype: str) -> Cache:
        """Return zeros. The state stays float32: it adds up the whole text."""
        last, state = (rows, KERNEL - 1, INNER), (rows, INNER, STATES)
        return [(jnp.zeros(last), jnp.zeros(state)) for _ in self.blocks]

    def __call__(
        self,
        tokens: jax.Array,
        start: jax.Array,
        length: jax.Array,
        cache: Cache,
        *,
        every: bool = False,
    ) -> tuple[jax.Array, Cache]:
        """Return float32 logits after the last valid token of each row, or after every one; and the cache."""
        x = self.embedding[tokens]
        after: Cache = []
        for block, (last, state) in zip(self.blocks, cache, strict=True):
            change, layer = block(x, length, last, state)
            x += change
            after.append(layer)
        if not every:
            x = x[jnp.arange(len(x)), jnp.maximum(length - 1, 0)]
        return normalized(x, self.norm) @ self.embedding.T, after


def normalized(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Divide by the root mean square (Zhang and Sennrich 2019, arXiv 1910.07467)."""
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * scale


def random_model(seed: int = 0) -> StateSpaceModel:
    """Return a model with random weights; decays and steps begin as in the authors' code."""
    keys = iter(jax.random.split(jax.random.key(seed), 6 * LAYERS + 1))

    def matrix(inputs: int, outputs: int) -> jax.Array:
        return jax.random.normal(next(keys), (inputs, outputs)) * inputs**-0.5

    def block() -> Block:
        step = jnp.exp(jax.random.uniform(next(keys), (INNER,), minval=-6.9, maxval=-2.3))
        return Block(
            norm=jnp.ones(WIDTH),
            inputs=matrix(WIDTH, 2 * INNER),
            kernel=matrix(KERNEL, INNER),
            bias=jnp.zeros(INNER),
            select=matrix(INNER, RANK + 2 * STATES),
            step=matrix(RANK, INNER),
            step_bias=jnp.log(jnp.expm1(step)),  # softplus of it is the step
            decay=jnp.log(jnp.broadcast_to(jnp.arange(1.0, STATES + 1), (INNER, STATES))),
            skip=jnp.ones(INNER),
            outputs=matrix(INNER, WIDTH),
        )

    embedding = matrix(VOCABULARY, WIDTH)
    return StateSpaceModel(embedding, [block() for _ in range(LAYERS)], jnp.ones(WIDTH))


model = random_model()
