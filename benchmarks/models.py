"""Makes what the benchmark runs on: a GPT-2 with random weights, and manifests for it.

    python benchmarks/models.py DIR

    DIR/gpt2/               Hugging Face layout, weights (in, out) as published
    DIR/gpt2.safetensors    the same weights for plain JAX: (out, in), every tensor 64-byte aligned
    DIR/gpt2-4.toml, DIR/gpt2-40.toml

Speed depends on shapes only. But with the usual initialization (0.02) a random model repeats one token for
ever, which would hide a broken KV cache: so the blocks are wider and the norms vary.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from workload import BUCKETS, EPSILON, HEADS, LAYERS, POSITIONS, VOCABULARY, WIDTH

SEED = 5
"""Chosen so that the two best logits differ by at least 0.002 at every step of every row: JAX and prejit add
in another order, and a near tie would let their tokens part."""

Weights = dict[str, np.ndarray]


def gpt2_weights() -> Weights:
    """Random weights by their published names, matrices (in, out)."""
    return {name: _random(index, name, shape) for index, (name, shape) in enumerate(_gpt2_shapes())}


def _gpt2_shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "wte.weight", (VOCABULARY, WIDTH)
    yield "wpe.weight", (POSITIONS, WIDTH)
    for layer in range(LAYERS):
        for norm in ("ln_1", "ln_2"):
            yield f"h.{layer}.{norm}.weight", (WIDTH,)
            yield f"h.{layer}.{norm}.bias", (WIDTH,)
        for product, rows, columns in (
            ("attn.c_attn", WIDTH, 3 * WIDTH),
            ("attn.c_proj", WIDTH, WIDTH),
            ("mlp.c_fc", WIDTH, 4 * WIDTH),
            ("mlp.c_proj", 4 * WIDTH, WIDTH),
        ):
            yield f"h.{layer}.{product}.weight", (rows, columns)
            yield f"h.{layer}.{product}.bias", (columns,)
    yield "ln_f.weight", (WIDTH,)
    yield "ln_f.bias", (WIDTH,)


def _random(index: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
    values = np.random.default_rng([SEED, index]).standard_normal(shape, dtype=np.float32)
    if name.endswith("weight") and "ln_" in name:
        return 1 + np.float32(0.1) * values
    wide = len(shape) == 2 and name.startswith("h.")
    return values * np.float32(0.08 if wide else 0.02)


def write_safetensors(path: Path, tensors: Weights) -> None:
    """Writes float32 tensors whose sizes are multiples of 64 bytes, each at a multiple of 64."""
    header, offset = {}, 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        header[name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % 64)  # the format allows spaces behind the header
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor).data)


def make(directory: Path) -> None:
    """Makes what is missing; weights of another seed or recipe lie in another directory."""
    directory.mkdir(parents=True, exist_ok=True)
    if not (directory / "gpt2").is_dir():
        weights = gpt2_weights()
        transposed = {
            n: w.T if n.startswith("h.") and w.ndim == 2 else w for n, w in weights.items()
        }
        write_safetensors(directory / "gpt2.safetensors", transposed)
        partial = directory / "gpt2.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        write_safetensors(partial / "model.safetensors", weights)
        config = {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "activation_function": "gelu_new",
            "n_layer": LAYERS,
            "n_embd": WIDTH,
            "n_head": HEADS,
            "n_positions": POSITIONS,
            "vocab_size": VOCABULARY,
            "layer_norm_epsilon": EPSILON,
            "tie_word_embeddings": True,
            "bos_token_id": VOCABULARY - 1,
            "eos_token_id": VOCABULARY - 1,
        }
        (partial / "config.json").write_text(json.dumps(config, indent=2))
        os.replace(partial, directory / "gpt2")
    for name, buckets in BUCKETS.items():
        sizes = "\n".join(f"{key} = {list(values)}" for key, values in buckets.items())
        (directory / f"{name}.toml").write_text(
            f'[bundle]\nname = "{name}"\n\n[model]\nsource = "gpt2"\ndtype = "float32"\n\n'
            f'[generate]\n{sizes}\n\n[[target]]\nname = "cpu-host"\n'
        )


if __name__ == "__main__":
    make(Path(sys.argv[1]))
