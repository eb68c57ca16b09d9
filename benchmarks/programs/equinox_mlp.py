"""Train an MLP with a stateful norm in equinox: filtered jit and grad, ensembles by filter_vmap."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax


class Net(eqx.Module):
    first: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    last: eqx.nn.Linear
    slope: float = eqx.field(static=True)

    def __init__(self, key, slope=0.1):
        keys = jax.random.split(key)
        self.first, self.last = eqx.nn.Linear(4, 16, key=keys[0]), eqx.nn.Linear(16, 1, key=keys[1])
        self.norm, self.slope = eqx.nn.LayerNorm(16), slope

    def __call__(self, x):
        return self.last(jax.nn.leaky_relu(self.norm(self.first(x)), self.slope))[0]


@eqx.filter_value_and_grad
def loss(model, x, y):
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


@eqx.filter_jit
def update(model, state, x, y):
    value, grads = loss(model, x, y)
    updates, state = optimizer.update(grads, state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), state, value


x = jax.random.normal(jax.random.key(1), (32, 4))
y = jnp.sin(x).sum(1)
model, optimizer = Net(jax.random.key(0)), optax.adamw(1e-2)
state = optimizer.init(eqx.filter(model, eqx.is_array))
for _ in range(5):
    model, state, value = update(model, state, x, y)
    print(float(value))
many = eqx.filter_vmap(Net)(jax.random.split(jax.random.key(2), 3))
print(
    eqx.filter_jit(eqx.filter_vmap(lambda net, x: net(x), in_axes=(eqx.if_array(0), None)))(
        many, x[0]
    ).tolist()
)
