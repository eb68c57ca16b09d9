"""A model of penzai with named axes: built, run, patched and differentiated, after its first notebook."""

import jax
import jax.numpy as jnp
import optax
from penzai import pz

model = pz.nn.Sequential(
    [
        pz.nn.Affine.from_config("first", jax.random.key(0), {"in": 4}, {"hidden": 8}),
        pz.nn.Elementwise(jax.nn.gelu),
        pz.nn.Affine.from_config("last", jax.random.key(1), {"hidden": 8}, {"out": 2}),
    ]
)
fixed = pz.bind_variables(*pz.unbind_params(model, freeze=True))  # with parameters that jit takes
x = pz.nx.wrap(jax.random.normal(jax.random.key(2), (6, 4))).tag("batch", "in")
run = jax.jit(lambda model, x: model(x))
print(run(fixed, x).unwrap("batch", "out").tolist())
flat = (
    fixed.select().at_instances_of(pz.nn.Elementwise).apply(lambda _: pz.nn.Elementwise(jnp.tanh))
)
print(run(flat, x).unwrap("batch", "out")[0].tolist())
free, frozen = pz.unbind_params(model)
params = {each.label: each.value for each in frozen}


@jax.jit
def update(params, x):
    def loss(params):
        bound = pz.bind_variables(free, [pz.Parameter(value=v, label=n) for n, v in params.items()])
        return jnp.mean(bound(x).unwrap("batch", "out") ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return optax.apply_updates(params, jax.tree.map(lambda g: -0.1 * g, grads)), value


for _ in range(3):
    params, value = update(params, x)
    print(float(value))
