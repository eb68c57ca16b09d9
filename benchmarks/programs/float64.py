"""Numerics in float64 and complex128, switched by config and by context, beside float32 and bfloat16."""

import jax
import jax.numpy as jnp
import numpy as np

matrix = np.vander(np.linspace(0.1, 1, 6))


@jax.jit
def solve(a, b):
    return jnp.linalg.solve(a, b)


@jax.jit
def precise(x):
    return jnp.sum(jnp.exp(x) * 1e-3), x.dtype.itemsize + jnp.zeros((), int)


print(solve(matrix, np.ones(6)).tolist(), solve(matrix, np.ones(6)).dtype)
with jax.enable_x64(True):
    print(solve(matrix, np.ones(6)).tolist(), solve(matrix, np.ones(6)).dtype)
    print([each.item() for each in precise(jnp.arange(3.0))])
print([each.item() for each in precise(jnp.arange(3.0))])
print(precise(jnp.arange(3, dtype=jnp.bfloat16))[0].item())
jax.config.update("jax_enable_x64", True)
print(solve(matrix, np.ones(6)).tolist(), precise(jnp.arange(3.0))[1].dtype)
print(jnp.fft.fft(jnp.arange(5.0)).tolist())
print(jax.jit(jnp.linalg.eigvalsh)(matrix @ matrix.T).tolist())
with jax.default_matmul_precision("highest"):
    print(jax.jit(lambda a: (a @ a).sum())(matrix.astype(np.float32)).item())
