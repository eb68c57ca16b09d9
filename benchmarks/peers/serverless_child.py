"""A function of a serverless platform that ranks 64 rows: with a bundle, and on plain jax.

peers/serverless_child.py prejit BUNDLE     `ServerlessHandler`; then what a restored snapshot does
peers/serverless_child.py jax WEIGHTS       `jax.jit` with the cache of JAX_COMPILATION_CACHE_DIR
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

ROWS, WIDTH, LAYERS = 64, 1024, 24
EVENT = {"seed": 3}


def rank(weights: Any, x: Any) -> Any:
    """Return scores float32 [B, 8] of rows float32 [B, WIDTH]."""
    import jax.numpy as jnp

    for weight in weights:
        x = jnp.tanh(x @ weight)
    return x[:, :8]


def rows(event: Any) -> Any:
    """Return the rows of an event."""
    return np.random.default_rng(event["seed"]).standard_normal((ROWS, WIDTH), np.float32)


def with_bundle(path: str) -> None:
    """Answer the first event, and then the first one after a restore on the same machine."""
    from prejit.runtime.adapters.serverless_handler import ServerlessHandler

    handler = ServerlessHandler(path, answer, on_mismatch="error")
    first = handler(EVENT)
    print("FIRST", flush=True)
    handler.before_snapshot()
    started = time.perf_counter()
    handler.after_restore()
    assert handler(EVENT) == first
    restored = time.perf_counter() - started
    print("LAST", json.dumps({"restored_seconds": restored, "scores": first[0][:2]}), flush=True)


def answer(bundle: Any, event: Any) -> list[list[float]]:
    """Return the answer to an event."""
    found: list[list[float]] = bundle.call("rank", rows(event)).tolist()
    return found


def with_jax(path: str) -> None:
    """Answer the first event."""
    import jax

    held = np.load(path)
    weights = [jax.numpy.asarray(held[name]) for name in held.files]
    ranked: Callable[..., Any] = jax.jit(rank)
    first = np.asarray(ranked(weights, rows(EVENT))).tolist()
    print("FIRST", flush=True)
    print("LAST", json.dumps({"scores": first[0][:2]}), flush=True)


if __name__ == "__main__":
    how, given = sys.argv[1:]
    with_bundle(given) if how == "prejit" else with_jax(given)
