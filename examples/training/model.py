"""A training step of optax on a mesh: two devices, each with half of the batch and half of a matrix."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

adam = optax.adam(1e-3)


def init(key: jax.Array) -> dict[str, Any]:
    """Return the state of a training that begins."""
    up, down = jax.random.split(key)
    weights = {
        "up": jax.random.normal(up, (64, 256)) / 8,
        "down": jax.random.normal(down, (256, 10)) / 16,
    }
    return {"weights": weights, "adam": adam.init(weights)}


def example(batch: int) -> dict[str, Any]:
    """Return arguments of the shapes to compile for."""
    return {
        "state": init(jax.random.key(0)),
        "x": jnp.zeros((batch, 64)),
        "label": jnp.zeros(batch, jnp.int32),
    }


def train_step(
    state: dict[str, Any], x: jax.Array, label: jax.Array
) -> tuple[dict[str, Any], jax.Array]:
    """Return the next state, and the loss before it."""

    def loss(weights: dict[str, jax.Array]) -> jax.Array:
        logits = jax.nn.relu(x @ weights["up"]) @ weights["down"]
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, label))

    value, gradients = jax.value_and_grad(loss)(state["weights"])
    updates, optimizer = adam.update(gradients, state["adam"])
    weights = optax.apply_updates(state["weights"], updates)
    return {"weights": weights, "adam": optimizer}, value
