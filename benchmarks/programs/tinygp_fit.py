"""Fit a Gaussian process of tinygp in float64 with jaxopt, then predict, after its front page."""

import jax
import jax.numpy as jnp
import jaxopt
import numpy as np
from tinygp import GaussianProcess, kernels

jax.config.update("jax_enable_x64", True)
random = np.random.default_rng(3)
x = np.sort(random.uniform(0, 5, 25))
y = np.sin(2 * x) + 0.1 * random.normal(size=x.size)


def build(params):
    kernel = jnp.exp(params["amplitude"]) * kernels.Matern52(jnp.exp(params["scale"]))
    return GaussianProcess(kernel, x, diag=jnp.exp(params["noise"]), mean=params["mean"])


@jax.jit
def loss(params):
    return -build(params).log_probability(y)


start = {"amplitude": -0.1, "scale": 0.0, "noise": -3.0, "mean": 0.0}
start = jax.tree.map(jnp.asarray, start)
print(float(loss(start)), {n: float(g) for n, g in jax.grad(loss)(start).items()})
solver = jaxopt.ScipyMinimize(fun=loss, maxiter=10)
found = solver.run(start)
print(float(found.state.fun_val))
predicted = build(found.params).condition(y, np.linspace(0, 5, 4)).gp
print(predicted.mean.tolist(), predicted.variance.tolist())
