"""Many jits of alike functions made in loops: closures over arrays, numbers and functions; donation."""

import jax
import jax.numpy as jnp


def make(scale, offset):
    @jax.jit
    def apply(x):
        return scale * x + offset

    return apply


def compose(*functions):
    def composed(x):
        for function in functions:
            x = function(x)
        return x

    return jax.jit(composed)


x = jnp.arange(3.0)
for scale in (1.0, 2.0, 3.0):
    print(make(scale, jnp.full(3, scale))(x).tolist(), make(scale, x)(x).tolist())
functions = [jax.jit(lambda x, n=n: x**n) for n in range(3)]
print(
    [function(x).tolist() for function in functions],
    [function(x, 2).tolist() for function in functions],
)
late = [jax.jit(lambda x: x * n) for n in range(3)]  # noqa: B023, all have the last one
print([function(x).tolist() for function in late])
print(compose(jnp.sin, jnp.cos)(x).tolist(), compose(jnp.cos, jnp.sin)(x).tolist())
add = jax.jit(lambda total, x: total + x, donate_argnums=0)
total = jnp.zeros(3)
for number in range(3):
    total = add(total, number * x)
print(total.tolist())
table = {"bias": jnp.ones(3)}
biased = jax.jit(lambda x: x + table["bias"])
print(biased(x).tolist())
table["bias"] = jnp.zeros(3)
print(biased(x).tolist(), jax.jit(lambda x: x + table["bias"])(x).tolist())
print(jax.grad(lambda w: (make(w, 0.0)(x) ** 2).sum())(3.0).item())
