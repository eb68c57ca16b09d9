"""Draw weights of a logistic regression from their posterior."""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np


def run(call: Callable[..., Any]) -> Any:
    """Return draws of the weights, float32 [500, 5], and how likely each was accepted."""
    random = np.random.default_rng(0)
    x = random.standard_normal((200, 5), np.float32)
    y = (x @ np.array([2, -1, 0, 1, 0]) + random.standard_normal(200) > 0).astype(np.float32)
    return call("draw", key=np.array([0, 1], np.uint32), x=x, y=y)


if __name__ == "__main__":
    from prejit.runtime import load

    weights, accepted = run(load(sys.argv[1], on_mismatch="error").call)
    print(weights[100:].mean(0), weights[100:].std(0), accepted.mean())
