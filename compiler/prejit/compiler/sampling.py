"""Choosing the next token on the device: part of every prefill and decode program.

Filters follow transformers (generation/logits_process.py: TemperatureLogitsWarper, TopKLogitsWarper,
TopPLogitsWarper, in this order), but without a sort, which costs XLA:CPU more than the whole decode step of
a small model: the smallest logit that stays is found by bisection over the 2**32 float values, exactly.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax


def sample(
    logits: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    seed: jax.Array,
    position: jax.Array,
) -> jax.Array:
    """The next token of each row.

    Args:
        logits: float32 [B, V].
        temperature: float32 [B]; 0 takes the most likely token.
        top_k: int32 [B]; 0 keeps all.
        top_p: float32 [B]; 1 keeps all.
        seed: uint32 [B, 2]; a threefry key for each row.
        position: int32 [B]; where the new token will stand. With the seed it decides the random numbers,
            so a token depends neither on its batch nor on how its prompt was split into chunks.

    Returns:
        int32 [B].
    """
    greedy = jnp.argmax(logits, -1).astype(jnp.int32)

    def draw() -> jax.Array:
        scaled = logits / jnp.where(temperature > 0, temperature, 1)[:, None]
        kept = _filter(scaled, top_k, top_p)
        drawn = jnp.argmax(
            kept + jax.vmap(_gumbel, (0, 0, None))(seed, position, logits.shape[1:]), -1
        )
        return jnp.where(temperature > 0, drawn.astype(jnp.int32), greedy)

    return lax.cond(jnp.any(temperature > 0), draw, lambda: greedy)


def _gumbel(seed: jax.Array, position: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Noise that makes the largest sum a draw from the softmax: the Gumbel-max trick (Gumbel 1954)."""
    key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position)
    return jax.random.gumbel(key, shape)


def _filter(logits: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """Logits [B, V] with -inf for every token that top-k, and of what is left top-p, takes away."""
    order, rows = _sortable(logits), len(logits)

    def above_k() -> jax.Array:
        found = _largest(lambda low: jnp.sum(order >= low[:, None], -1) >= top_k, rows)
        return jnp.where(top_k > 0, found, 0)

    # Every key is at least 0, so a lowest key of 0 keeps all tokens.
    everything = jnp.zeros(rows, jnp.uint32)
    low = lax.cond(jnp.any(top_k > 0), above_k, lambda: everything)
    logits = jnp.where(order >= low[:, None], logits, -jnp.inf)

    def above_p() -> jax.Array:
        probability = jax.nn.softmax(logits)
        found = _largest(
            lambda low: jnp.sum(probability, -1, where=order >= low[:, None]) >= top_p, rows
        )
        return jnp.where(top_p < 1, found, 0)

    low = lax.cond(jnp.any(top_p < 1), above_p, lambda: everything)
    return jnp.where(order >= low[:, None], logits, -jnp.inf)


def _sortable(values: jax.Array) -> jax.Array:
    """uint32 keys in the order of float32 values: the sign bit flipped, negative values mirrored."""
    bits = lax.bitcast_convert_type(values, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _largest(holds: Callable[[jax.Array], jax.Array], rows: int) -> jax.Array:
    """The largest uint32 [B] for which `holds`, which must be true up to it and false above.

    Sets one bit after another, the highest first: 32 passes over the rows.
    """

    def set_bit(place: jax.Array, found: jax.Array) -> jax.Array:
        tried = found | (jnp.uint32(1 << 31) >> place.astype(jnp.uint32))
        return jnp.where(holds(tried), tried, found)

    return lax.fori_loop(0, 32, set_bit, jnp.zeros(rows, jnp.uint32))
