"""Least squares, roots and minima with optimistix, and a linear solve with lineax, after their pages."""

import jax
import jax.numpy as jnp
import lineax
import optimistix as optx

x = jnp.linspace(0, 4, 20)
y = 2.5 * jnp.exp(-0.7 * x) + 0.01 * jax.random.normal(jax.random.key(0), x.shape)


def residuals(params, data):
    x, y = data
    return params["scale"] * jnp.exp(-params["rate"] * x) - y


start = {"scale": jnp.array(1.0), "rate": jnp.array(1.0)}
solver = optx.LevenbergMarquardt(rtol=1e-5, atol=1e-5)
found = optx.least_squares(residuals, solver, start, args=(x, y))
print({name: float(value) for name, value in found.value.items()}, int(found.stats["num_steps"]))
root = optx.root_find(
    lambda y, a: y - jnp.tanh(y * a + 1), optx.Newton(1e-5, 1e-5), jnp.array(0.0), args=0.5
)
print(float(root.value))
lowest = optx.minimise(
    lambda p, _: (1 - p[0]) ** 2 + 10 * (p[1] - p[0] ** 2) ** 2,
    optx.BFGS(1e-4, 1e-4),
    jnp.array([-1.0, 1.0]),
)
print(lowest.value.tolist())
matrix = jax.random.normal(jax.random.key(1), (6, 6)) + 6 * jnp.eye(6)
operator = lineax.MatrixLinearOperator(matrix)
print(lineax.linear_solve(operator, jnp.arange(6.0)).value.tolist())
print(
    jax.jit(lambda b: lineax.linear_solve(operator, b, lineax.GMRES(1e-5, 1e-5)).value)(
        jnp.ones(6)
    ).tolist()
)
