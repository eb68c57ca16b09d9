"""A training step sharded over eight devices by axes fsdp and tp, with logical rules, as MaxText has it."""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import functools

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

mesh = jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)
RULES = {"embed": "fsdp", "mlp": "tp", "vocab": "tp", "batch": "fsdp", None: None}


def sharding(*axes):
    return NamedSharding(mesh, PartitionSpec(*(RULES[axis] for axis in axes)))


SHAPES = {
    "table": ((32, 16), ("vocab", "embed")),
    "up": ((16, 64), ("embed", "mlp")),
    "down": ((64, 16), ("mlp", "embed")),
}
places = {name: sharding(*axes) for name, (_, axes) in SHAPES.items()}
optimizer = optax.adamw(1e-2)


@functools.partial(jax.jit, out_shardings=places)
def init(key):
    keys = jax.random.split(key, len(SHAPES))
    return {
        n: jax.random.normal(k, s) / 4 for k, (n, (s, _)) in zip(keys, SHAPES.items(), strict=True)
    }


def loss(params, tokens):
    x = jax.lax.with_sharding_constraint(
        params["table"][tokens[:, :-1]], sharding("batch", None, None)
    )
    h = jax.lax.with_sharding_constraint(
        jax.nn.gelu(x @ params["up"]), sharding("batch", None, "mlp")
    )
    logits = (x + h @ params["down"]) @ params["table"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


@functools.partial(jax.jit, donate_argnums=(0, 1))
def step(params, state, tokens):
    value, grads = jax.value_and_grad(loss)(params, tokens)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value


params = init(jax.random.key(0))
state = jax.jit(optimizer.init)(params)
tokens = jax.device_put(
    jax.random.randint(jax.random.key(1), (8, 9), 0, 32), sharding("batch", None)
)
for _ in range(4):
    params, state, value = step(params, state, tokens)
    print(float(value))
print(params["up"].sharding.spec, float(jnp.abs(params["up"]).sum()), jax.device_count())
