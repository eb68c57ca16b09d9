"""Move 64 bodies by 1,000 steps."""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


class Bodies(NamedTuple):
    """As in model.py, which a server does not have."""

    position: Any
    velocity: Any


def run(call: Callable[..., Any]) -> Any:
    """Return the bodies after 1,000 steps, and their kinetic energy at each."""
    random = np.random.default_rng(0)
    bodies = Bodies(random.standard_normal((64, 3), np.float32), np.zeros((64, 3), np.float32))
    return call("simulate", bodies=bodies, mass=np.full(64, 1 / 64, np.float32))


if __name__ == "__main__":
    from prejit.runtime import load

    bodies, energy = run(load(sys.argv[1], on_mismatch="error").call)
    print(bodies.position[0], energy[-1])
