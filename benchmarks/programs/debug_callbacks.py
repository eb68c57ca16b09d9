"""Debug prints and callbacks into Python, which must run in every call, beside functions without any."""

import jax
import jax.numpy as jnp
import numpy as np

seen = []


@jax.jit
def noisy(x):
    jax.debug.print("mean {}", x.mean(), ordered=True)
    return x + 1


@jax.jit
def through_numpy(x):
    return (
        jax.pure_callback(lambda x: np.sort(x)[::-1], jax.ShapeDtypeStruct(x.shape, x.dtype), x) * 2
    )


@jax.jit
def recorded(x):
    jax.debug.callback(lambda x: seen.append(float(x)), x.sum())
    return x.max()


@jax.jit
def traced_aloud(x):
    print("traced", x.shape)
    return x - 1


@jax.jit
def quiet(x):
    return jnp.cos(x).sum()


x = jnp.array([3.0, 1.0, 2.0])
for _ in range(2):
    print(noisy(x).tolist(), through_numpy(x).tolist(), recorded(x).item(), quiet(x).item())
    print(traced_aloud(x).tolist())
jax.effects_barrier()
print(seen)
