"""Fit a normalizing flow of distrax to a ring, and mix distributions, after its README."""

import distrax
import jax
import jax.numpy as jnp
import optax


def flow(params):
    def conditioner(x):
        return jnp.tanh(x @ params["in"]) @ params["out"]

    def bijector(values):
        shift, log_scale = jnp.split(values, 2, -1)
        return distrax.ScalarAffine(shift=shift, log_scale=0.1 * log_scale)

    mask = jnp.array([True, False])
    layers = [distrax.MaskedCoupling(each, conditioner, bijector) for each in (mask, ~mask)]
    base = distrax.MultivariateNormalDiag(jnp.zeros(2), jnp.ones(2))
    return distrax.Transformed(base, distrax.Chain(layers))


@jax.jit
def update(params, data):
    value, grads = jax.value_and_grad(lambda p: -flow(p).log_prob(data).mean())(params)
    return optax.apply_updates(params, jax.tree.map(lambda g: -0.1 * g, grads)), value


angles = jax.random.uniform(jax.random.key(0), (64,), maxval=6.28)
data = jnp.stack([jnp.cos(angles), jnp.sin(angles)], -1)
params = {"in": jax.random.normal(jax.random.key(1), (2, 8)), "out": jnp.zeros((8, 4))}
for _ in range(3):
    params, value = update(params, data)
    print(float(value))
mixture = distrax.MixtureSameFamily(
    distrax.Categorical(probs=jnp.array([0.3, 0.7])), distrax.Normal(jnp.array([-1.0, 1.0]), 0.5)
)
print(
    mixture.sample(seed=jax.random.key(2), sample_shape=(3,)).tolist(), float(mixture.log_prob(0.2))
)
print(
    jax.jit(lambda params, key: flow(params).sample(seed=key))(params, jax.random.key(3)).tolist()
)
