"""Draw an image from noise, in 20 steps of a U-Net."""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np


def run(call: Callable[..., Any]) -> Any:
    """Return one image, float32 [1, 32, 32, 3]."""
    noise = np.random.default_rng(0).standard_normal((1, 32, 32, 3), np.float32)
    return call("sample", noise)


if __name__ == "__main__":
    from prejit.runtime import load

    image = run(load(sys.argv[1], on_mismatch="error").call)
    print(image.shape, image.dtype, image.mean())
