"""Ask a policy for torques."""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np


def run(call: Callable[..., Any]) -> Any:
    """Return torques, float32 [6], from -1 to 1."""
    observation = np.linspace(-1, 1, 17, dtype=np.float32)
    return call("act", observation)


if __name__ == "__main__":
    from prejit.runtime import load

    print(run(load(sys.argv[1], on_mismatch="error").call))
