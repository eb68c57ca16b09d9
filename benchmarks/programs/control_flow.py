"""Scans, while loops, switches and associative scans, and vmap over functions that close over values."""

import jax
import jax.numpy as jnp


@jax.jit
def collatz(n):
    def step(carry):
        n, count = carry
        return jax.lax.cond(n % 2 == 0, lambda n: n // 2, lambda n: 3 * n + 1, n), count + 1

    return jax.lax.while_loop(lambda carry: carry[0] != 1, step, (n, 0))[1]


def polynomial(coefficients):
    return lambda x: jnp.polyval(coefficients, x)


@jax.jit
def machine(codes, x):
    ops = [jnp.sin, jnp.cos, lambda x: x * x, jax.nn.softplus]

    def run(x, code):
        x = jax.lax.switch(code, ops, x)
        return x, x

    return jax.lax.scan(run, x, codes, unroll=2)


print(jax.vmap(collatz)(jnp.arange(1, 12)).tolist())
print(collatz(27).item(), collatz(jnp.int16(27)).item())
for degree in (2, 3):
    print(
        jax.jit(jax.vmap(polynomial(jnp.arange(1.0, 2 + degree))))(jnp.linspace(0, 1, 4)).tolist()
    )
end, path = machine(jnp.array([0, 1, 2, 3]), 0.5)
print(end.item(), path.tolist())
a, b = jax.random.uniform(jax.random.key(0), (2, 8))
combine = jax.jit(
    lambda a, b: jax.lax.associative_scan(lambda p, q: (p[0] * q[0], q[0] * p[1] + q[1]), (a, b))
)
print(combine(a, b)[1].tolist())
print(
    jax.lax.map(
        lambda x: jnp.linalg.det(x), jax.random.normal(jax.random.key(1), (3, 4, 4))
    ).tolist()
)
