"""Train a CNN of flax.linen with dropout and batch norm, a TrainState and donated buffers."""

import functools
from typing import Any

import jax
import optax
from flax import linen as nn
from flax.training import train_state


class CNN(nn.Module):
    width: int = 8

    @nn.compact
    def __call__(self, x, *, train: bool):
        x = nn.relu(nn.BatchNorm(use_running_average=not train)(nn.Conv(self.width, (3, 3))(x)))
        x = nn.avg_pool(x, (2, 2), strides=(2, 2)).reshape((x.shape[0], -1))
        return nn.Dense(10)(nn.Dropout(0.2, deterministic=not train)(x))


class TrainState(train_state.TrainState):
    batch_stats: Any


@functools.partial(jax.jit, donate_argnames="state")
def train_step(state, images, labels, key):
    def loss(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, new = state.apply_fn(
            variables, images, train=True, rngs={"dropout": key}, mutable=["batch_stats"]
        )
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), new

    (value, new), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads, batch_stats=new["batch_stats"]), value


@jax.jit
def accuracy(state, images, labels):
    logits = state.apply_fn(
        {"params": state.params, "batch_stats": state.batch_stats}, images, train=False
    )
    return (logits.argmax(-1) == labels).mean(), logits[0]


images = jax.random.normal(jax.random.key(0), (16, 8, 8, 1))
labels = jax.random.randint(jax.random.key(1), (16,), 0, 10)
model = CNN()
variables = model.init(jax.random.key(2), images, train=False)
state = TrainState.create(apply_fn=model.apply, tx=optax.adam(1e-2), **variables)
for key in jax.random.split(jax.random.key(3), 4):
    state, value = train_step(state, images, labels, key)
    print(float(value))
print(*(each.tolist() for each in accuracy(state, images, labels)), int(state.step))
