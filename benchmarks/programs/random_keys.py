"""Random keys, typed and raw, through jit: splits, folds, keys as arguments and results, two generators."""

import jax
import jax.numpy as jnp


@jax.jit
def draw(key):
    key, one, two = jax.random.split(key, 3)
    return key, {"normal": jax.random.normal(one, (2,)), "order": jax.random.permutation(two, 5)}


@jax.jit
def tree_of_keys(key, n):
    return [jax.random.fold_in(key, n), jax.random.split(key)], jax.random.bits(key, (2,))


key = jax.random.key(7)
for _ in range(3):
    key, found = draw(key)
    print(
        jax.random.key_data(key).tolist(), {name: value.tolist() for name, value in found.items()}
    )
raw = draw(jax.random.PRNGKey(7))
print(raw[0].tolist(), raw[1]["normal"].tolist())
other = draw(jax.random.key(7, impl="rbg"))
print(jax.random.key_data(other[0]).tolist(), other[1]["normal"].tolist())
keys, bits = tree_of_keys(key, 3)
print(keys[0].dtype, keys[1].shape, bits.tolist())
print(jax.vmap(lambda key: jax.random.gamma(key, 2.0))(keys[1]).tolist())
with jax.default_prng_impl("unsafe_rbg"):
    print(jax.random.uniform(jax.random.key(1), (2,)).tolist())
print(jax.random.categorical(keys[0], jnp.log(jnp.array([0.1, 0.2, 0.7])), shape=(8,)).tolist())
