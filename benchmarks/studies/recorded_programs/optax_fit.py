"""Fit a multilayer perceptron with a schedule and clipped gradients, after optax's "Getting started"."""

import jax
import jax.numpy as jnp
import optax

keys = jax.random.split(jax.random.key(0), 4)
sizes = (64, 128, 128, 1)
params = [
    {"w": jax.random.normal(key, (n, m)) / n**0.5, "b": jnp.zeros(m)}
    for key, n, m in zip(keys, sizes[:-1], sizes[1:], strict=False)
]
x = jax.random.normal(keys[3], (256, 64))
y = jnp.sin(x.sum(axis=1, keepdims=True))
schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 5, 50)
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))


def loss_of(params: list[dict[str, jax.Array]], x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the mean squared error."""
    for layer in params[:-1]:
        x = jax.nn.gelu(x @ layer["w"] + layer["b"])
    return optax.l2_loss(x @ params[-1]["w"] + params[-1]["b"], y).mean()


@jax.jit
def step(params, state, x, y):
    """Return parameters, state and loss after one step."""
    loss, gradients = jax.value_and_grad(loss_of)(params, x, y)
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, loss


state = optimizer.init(params)
for _ in range(50):
    params, state, loss = step(params, state, x, y)
print(f"{float(loss):.4f}")
