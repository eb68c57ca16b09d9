"""Train a small classifier: the state stays on the devices."""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

random = np.random.default_rng(0)
X = random.standard_normal((128, 64), np.float32)
LABEL = (X[:, :10].argmax(1)).astype(np.int32)


def run(call: Callable[..., Any]) -> Any:
    """Return the state after one step, and the loss before it."""
    state = call("init", key=np.array([0, 7], np.uint32))
    return call("train_step", state=state, x=X, label=LABEL)


if __name__ == "__main__":
    from prejit.runtime import load

    bundle = load(sys.argv[1], on_mismatch="error")
    step = bundle.bind("train_step", state=bundle.call("init", key=np.array([0, 7], np.uint32)))
    losses = [float(step(x=X, label=LABEL)) for _ in range(200)]
    print(losses[0], losses[-1])
