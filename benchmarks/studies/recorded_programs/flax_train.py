"""A small CNN that learns for three steps, after flax's "MNIST tutorial" (nnx), on random images."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx


class CNN(nnx.Module):
    """Two convolutions and two dense layers."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.conv1 = nnx.Conv(1, 32, kernel_size=(3, 3), rngs=rngs)
        self.conv2 = nnx.Conv(32, 64, kernel_size=(3, 3), rngs=rngs)
        self.linear1 = nnx.Linear(3136, 256, rngs=rngs)
        self.linear2 = nnx.Linear(256, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.avg_pool(nnx.relu(self.conv1(x)), window_shape=(2, 2), strides=(2, 2))
        x = nnx.avg_pool(nnx.relu(self.conv2(x)), window_shape=(2, 2), strides=(2, 2))
        return self.linear2(nnx.relu(self.linear1(x.reshape(x.shape[0], -1))))


def loss_of(model: CNN, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the mean cross entropy."""
    logits = model(images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@nnx.jit
def train_step(
    model: CNN, optimizer: nnx.Optimizer, images: jax.Array, labels: jax.Array
) -> jax.Array:
    """Learn from one batch, and return its loss."""
    loss, gradients = nnx.value_and_grad(loss_of)(model, images, labels)
    optimizer.update(model, gradients)
    return loss


model = CNN(rngs=nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adamw(0.005, 0.9), wrt=nnx.Param)
images = jax.random.normal(jax.random.key(1), (32, 28, 28, 1))
labels = jnp.arange(32) % 10
for _ in range(3):
    loss = train_step(model, optimizer, images, labels)
print(f"{float(loss):.4f}")
