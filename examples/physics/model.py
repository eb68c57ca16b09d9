"""Bodies that attract each other, moved by the leapfrog method: 1,000 steps in one call.

Source: Hockney and Eastwood 1988, "Computer Simulation Using Particles", leapfrog integration.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

STEPS, SECONDS = 1000, 1e-3


class Bodies(NamedTuple):
    """State of N bodies: positions and velocities, float32 [N, 3]."""

    position: jax.Array
    velocity: jax.Array


def example(bodies: int) -> dict[str, object]:
    """Return arguments of the shapes to compile for."""
    return {
        "bodies": Bodies(jnp.zeros((bodies, 3)), jnp.zeros((bodies, 3))),
        "mass": jnp.zeros(bodies),
    }


def acceleration(position: jax.Array, mass: jax.Array) -> jax.Array:
    """Return the acceleration of each body, float32 [N, 3]."""
    apart = position[None] - position[:, None]  # [N, N, 3]
    distance = jnp.sum(apart**2, -1) + 1e-2  # softened, so that close bodies do not fly apart
    return jnp.einsum("nmd,m->nd", apart * distance[..., None] ** -1.5, mass)


def simulate(bodies: Bodies, mass: jax.Array) -> tuple[Bodies, jax.Array]:
    """Return the bodies after 1,000 steps, and their kinetic energy at each, float32 [1000]."""

    def step(now: Bodies, _: None) -> tuple[Bodies, jax.Array]:
        half = now.velocity + 0.5 * SECONDS * acceleration(now.position, mass)
        position = now.position + SECONDS * half
        velocity = half + 0.5 * SECONDS * acceleration(position, mass)
        return Bodies(position, velocity), 0.5 * jnp.sum(mass[:, None] * velocity**2)

    return jax.lax.scan(step, bodies, None, length=STEPS)
