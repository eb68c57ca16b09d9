"""Cool and simulate a Lennard-Jones gas with JAX MD: FIRE, then Nose-Hoover, as in its notebooks."""

import jax
import jax.numpy as jnp
from jax_md import energy, simulate, space
from jax_md.minimize import fire_descent

displacement, shift = space.periodic(4.0)
positions = 4.0 * jax.random.uniform(jax.random.key(0), (16, 2))
total = jax.jit(energy.soft_sphere_pair(displacement))
init, apply = fire_descent(total, shift)
apply = jax.jit(apply)
state = init(positions)
print(float(total(positions)))
for _ in range(5):
    state = apply(state)
print(float(total(state.position)))
init, apply = simulate.nvt_nose_hoover(
    energy.lennard_jones_pair(displacement), shift, dt=1e-3, kT=0.1
)
state = init(jax.random.key(1), state.position)
state = jax.lax.fori_loop(0, 20, lambda _, state: apply(state), state)
print(state.position[0].tolist(), float(jnp.sum(state.momentum**2)))
