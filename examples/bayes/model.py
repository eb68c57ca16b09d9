"""Logistic regression by the No-U-Turn sampler of blackjax: 500 draws in one call.

Source: Hoffman and Gelman 2014, "The No-U-Turn Sampler".
"""

import blackjax
import jax
import jax.numpy as jnp

DRAWS = 500


def draw(key: jax.Array, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return draws of the weights, float32 [500, D], and how likely each was accepted, float32 [500].

    Args:
        key: a random key.
        x: features, float32 [N, D].
        y: classes, float32 [N], 0 or 1.
    """

    def log_density(weights: jax.Array) -> jax.Array:
        logits = x @ weights
        likelihood = jnp.sum(y * logits - jnp.logaddexp(0, logits))
        return likelihood - 0.5 * jnp.sum(weights**2)

    dimensions = x.shape[1]
    sampler = blackjax.nuts(log_density, 0.1, jnp.ones(dimensions))

    def step(state, key):  # type: ignore[no-untyped-def]
        state, info = sampler.step(key, state)
        return state, (state.position, info.acceptance_rate)

    first = sampler.init(jnp.zeros(dimensions))
    return jax.lax.scan(step, first, jax.random.split(key, DRAWS))[1]
