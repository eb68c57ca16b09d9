"""Run every shape of an encoder once, then again and again.

    peers/encode_child.py bundle PATH     from a bundle
    peers/encode_child.py jax    MODEL    plain JAX, one jitted function

Both encode rows of token ids that fill each shape. The peers' children call `measure`, too.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness import workload

STEADY_SECONDS = 0.3
"""Seconds that each shape is repeated for, but at least five runs."""

Encode = Callable[[list[list[int]]], Any]


def rows(batch: int, length: int) -> list[list[int]]:
    """Return token ids that exist and are not special."""
    ids = workload.prompt_ids(batch * length)
    flat = [1000 + token % 29000 for token in ids]
    return [flat[row * length : (row + 1) * length] for row in range(batch)]


def measure(encode: Encode) -> None:
    """Run every shape for the first time, then time each until its time is known.

    Args:
        encode: function from B rows of token ids to embeddings, float32 [B, D].
    """
    sentences = {
        f"{batch}x{length}": rows(batch, length) for batch, length in workload.ENCODER_SHAPES
    }
    sums: dict[str, float] = {}
    first: dict[str, float] = {}
    for shape, ids in sentences.items():
        begun = time.perf_counter()
        embeddings = encode(ids)
        first[shape] = time.perf_counter() - begun
        if not sums:
            workload.say_first()
        sums[shape] = float(embeddings[:, 0].sum())
    steady = {}
    for shape, ids in sentences.items():
        times: list[float] = []
        while len(times) < 5 or sum(times) < STEADY_SECONDS:
            begun = time.perf_counter()
            encode(ids)
            times.append(time.perf_counter() - begun)
        steady[shape] = sorted(times)[len(times) // 2]
    workload.say_last(first=first, steady=steady, sums=sums)


def bundle(path: str) -> None:
    """Encode from a bundle, where nothing may be compiled."""
    from prejit.runtime import load

    loaded = load(path, on_mismatch="error")
    measure(lambda ids: loaded.encode_batch(ids).embeddings)
    compiled = [r.program for r in loaded.report() if r.source not in ("loaded", "unused")]
    assert not compiled, compiled


def plain(path: str) -> None:
    """Encode with the same model as a user of JAX writes it."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from safetensors.numpy import load_file

    from benchmarks.harness.encoder_model import HEADS, LAYERS, WIDTH

    weights = {
        name: jax.device_put(np.ascontiguousarray(w.T if ".layer." in name and w.ndim == 2 else w))
        for name, w in load_file(Path(path, "model.safetensors")).items()
    }

    def linear(w: Any, name: str, x: Any) -> Any:
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    def norm(w: Any, name: str, x: Any) -> Any:
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-12)
        return scaled * w[f"{name}.weight"] + w[f"{name}.bias"]

    def embed(w: Any, tokens: Any, length: Any) -> Any:
        batch, count = tokens.shape
        valid = jnp.arange(count) < length[:, None]
        x = w["embeddings.word_embeddings.weight"][tokens]
        x += w["embeddings.position_embeddings.weight"][:count]
        x = norm(w, "embeddings.LayerNorm", x + w["embeddings.token_type_embeddings.weight"][0])
        for layer in range(LAYERS):
            at = f"encoder.layer.{layer}"
            query, keys, values = (
                linear(w, f"{at}.attention.self.{name}", x).reshape(batch, count, HEADS, -1)
                for name in ("query", "key", "value")
            )
            scores = jnp.einsum("bqnh,bknh->bnqk", query, keys) / (WIDTH // HEADS) ** 0.5
            shares = jax.nn.softmax(jnp.where(valid[:, None, None], scores, -1e30))
            mixed = jnp.einsum("bnqk,bknh->bqnh", shares, values).reshape(batch, count, WIDTH)
            mixed = linear(w, f"{at}.attention.output.dense", mixed)
            x = norm(w, f"{at}.attention.output.LayerNorm", x + mixed)
            inner = jax.nn.gelu(linear(w, f"{at}.intermediate.dense", x), approximate=False)
            inner = linear(w, f"{at}.output.dense", inner)
            x = norm(w, f"{at}.output.LayerNorm", x + inner)
        mean = jnp.where(valid[..., None], x, 0).sum(1) / length[:, None]
        return mean / jnp.linalg.norm(mean, axis=-1, keepdims=True)

    jitted = jax.jit(embed)

    def encode(ids: list[list[int]]) -> Any:
        tokens = np.array(ids, np.int32)
        return np.asarray(jitted(weights, tokens, np.full(len(ids), len(ids[0]), np.int32)))

    measure(encode)


if __name__ == "__main__":
    {"bundle": bundle, "jax": plain}[sys.argv[1]](sys.argv[2])
