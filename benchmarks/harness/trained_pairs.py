"""A trained pair of models: the demo model, and a smaller one that learns from it. Both can be made larger.

A larger one computes the same function at the cost of its size (Net2Net, Chen et al. 2016, arXiv 1511.05641):
activations are repeated, which layer norms do not see, and further layers add 0, as their norms give 0. So a
large model has the distribution of a trained one. All its matrices are dense but for the demo model's.
"""

from __future__ import annotations

import json
import runpy
import shutil
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from benchmarks.harness.fresh_processes import progress

DEMO = Path(__file__).parents[2] / "manifests" / "demo-model"
HEADS, HEAD_SIZE = 4, 64
"""Heads of the demo model, and the size of a head of larger ones, as GPT-2 has it."""
STEPS, WINDOW, RATE = 400, 128, 1e-3

Weights = dict[str, Any]


def demo_text() -> tuple[Any, Any]:
    """Return the tokens that the demo model was trained on, and those of the files that it has not seen."""
    training = runpy.run_path(str(DEMO / "train.py"))
    encode = training["encode"]
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    seen: list[str] = []
    unseen: list[str] = []
    for name, text in training["read_library"]().items():
        (unseen if training["is_validation"](name) else seen).append(text)
    return encode(tokenizer, seen), encode(tokenizer, unseen)


def gpt2(weights: Weights, tokens: Any) -> Any:
    """Return the logits [B, T, V] of a model with HEADS heads."""

    def norm(x: Any, at: str) -> Any:
        x -= x.mean(-1, keepdims=True)
        x *= jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)
        return x * weights[f"{at}.weight"] + weights[f"{at}.bias"]

    def linear(x: Any, at: str) -> Any:
        return x @ weights[f"{at}.weight"] + weights[f"{at}.bias"]

    batch, length = tokens.shape
    x = weights["transformer.wte.weight"][tokens] + weights["transformer.wpe.weight"][:length]
    for layer in count():
        at = f"transformer.h.{layer}"
        if f"{at}.ln_1.weight" not in weights:
            break
        heads = linear(norm(x, f"{at}.ln_1"), f"{at}.attn.c_attn")
        query, key, value = heads.reshape(batch, length, 3, HEADS, -1).transpose(2, 0, 3, 1, 4)
        scores = jnp.einsum("bnth,bnsh->bnts", query * query.shape[-1] ** -0.5, key)
        scores = jax.nn.softmax(jnp.where(jnp.tri(length, dtype=bool), scores, -jnp.inf))
        mixed = jnp.einsum("bnts,bnsh->btnh", scores, value).reshape(x.shape)
        x += linear(mixed, f"{at}.attn.c_proj")
        inner = jax.nn.gelu(linear(norm(x, f"{at}.ln_2"), f"{at}.mlp.c_fc"), approximate=True)
        x += linear(inner, f"{at}.mlp.c_proj")
    return norm(x, "transformer.ln_f") @ weights["transformer.wte.weight"].T


def distilled(teacher: Weights, tokens: Any) -> Weights:
    """Return a model of the teacher's first layer that has learnt its distributions.

    As DistilGPT2 was made (Sanh et al. 2019, arXiv 1910.01108), with their loss from the teacher alone.
    """
    teacher = {name: jnp.asarray(value) for name, value in teacher.items()}
    student = {name: teacher[name] for name in teacher if ".h." not in name or ".h.0." in name}
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adam(optax.cosine_decay_schedule(RATE, STEPS))
    )

    def loss_of(weights: Weights, rows: Any) -> Any:
        want = jax.nn.log_softmax(gpt2(teacher, rows))
        return (jnp.exp(want) * (want - jax.nn.log_softmax(gpt2(weights, rows)))).sum(-1).mean()

    def updated(weights: Weights, state: Any, rows: Any) -> tuple[Weights, Any, Any]:
        loss, gradients = jax.value_and_grad(loss_of)(weights, rows)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(weights, updates), state, loss

    step, state = jax.jit(updated), optimizer.init(student)
    for number, rows in enumerate(_batches(tokens)):
        student, state, loss = step(student, state, rows)
        if number % 50 == 0:
            progress(f"training: step {number} of {STEPS}, {float(loss):.3f} nats a token")
    return {name: np.asarray(value) for name, value in student.items()}


def _batches(tokens: Any) -> Iterator[jax.Array]:
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        starts = rng.integers(0, len(tokens) - WINDOW, 16)
        yield jnp.asarray(tokens[starts[:, None] + np.arange(WINDOW)])


def enlarged(weights: Weights, copies: int, layers: int) -> Weights:
    """Return the weights of the same function at so many times the width, with so many layers."""
    rng = np.random.default_rng(0)
    width = copies * weights["transformer.wte.weight"].shape[1]
    heads = width // HEAD_SIZE
    found = {n: np.tile(value, copies) for n, value in weights.items() if ".h." not in n}
    # The head is the embedding, and sums all copies.
    found |= {name: found[name] / np.float32(copies) for name in found if ".ln_f." in name}

    def reading(matrix: Any) -> Any:
        return np.tile(matrix, (copies, 1)) / np.float32(copies)

    def in_heads(values: Any) -> Any:
        """Put query, key and value [..., 3 * D] into more and larger heads."""
        split = values.reshape(*values.shape[:-1], 3, HEADS, -1)
        more = [(0, 0)] * (split.ndim - 2) + [(0, heads - HEADS), (0, HEAD_SIZE - split.shape[-1])]
        wide = np.pad(split, more)
        wide[..., 0, :, :] *= np.float32((HEAD_SIZE / split.shape[-1]) ** 0.5)
        return wide.reshape(*values.shape[:-1], 3 * width)

    for layer in range(layers):
        at = f"transformer.h.{layer}"
        if f"{at}.ln_1.weight" in weights:
            old = {name.removeprefix(at): weights[name] for name in weights if f"{at}." in name}
            new = {name: np.tile(old[name], copies) for name in old if ".ln_" in name}
            new[".attn.c_attn.weight"] = in_heads(reading(old[".attn.c_attn.weight"]))
            new[".attn.c_attn.bias"] = in_heads(old[".attn.c_attn.bias"])
            rows = old[".attn.c_proj.weight"].reshape(HEADS, -1, len(old[".ln_1.bias"]))
            rows = np.pad(rows, [(0, heads - HEADS), (0, HEAD_SIZE - rows.shape[1]), (0, 0)])
            new[".attn.c_proj.weight"] = np.tile(rows.reshape(width, -1), copies)
            inner = 4 * width - len(old[".mlp.c_fc.bias"])
            new[".mlp.c_fc.weight"] = np.pad(reading(old[".mlp.c_fc.weight"]), [(0, 0), (0, inner)])
            new[".mlp.c_fc.bias"] = np.pad(old[".mlp.c_fc.bias"], (0, inner))
            rows = np.pad(old[".mlp.c_proj.weight"], [(0, inner), (0, 0)])
            new[".mlp.c_proj.weight"] = np.tile(rows, copies)
            for name in (".attn.c_proj.bias", ".mlp.c_proj.bias"):
                new[name] = np.tile(old[name], copies)
        else:
            new = {f".{name}.weight": np.zeros(width, np.float32) for name in ("ln_1", "ln_2")}
            for name, (inputs, outputs) in {
                "attn.c_attn": (width, 3 * width),
                "attn.c_proj": (width, width),
                "mlp.c_fc": (width, 4 * width),
                "mlp.c_proj": (4 * width, width),
            }.items():
                drawn = rng.standard_normal((inputs, outputs), np.float32)
                new[f".{name}.weight"] = drawn * np.float32(0.02)
                new[f".{name}.bias"] = np.zeros(outputs, np.float32)
            new |= {f".{name}.bias": np.zeros(width, np.float32) for name in ("ln_1", "ln_2")}
        found |= {f"{at}{name}": np.ascontiguousarray(value) for name, value in new.items()}
    return found


def write_model(directory: Path, weights: Weights) -> None:
    """Write a directory with the demo model's tokenizer and these weights."""
    shutil.copytree(DEMO, directory, dirs_exist_ok=True)
    width = weights["transformer.wte.weight"].shape[1]
    demo = json.loads((DEMO / "config.json").read_text())
    layers = sum(name.endswith(".ln_1.weight") for name in weights)
    heads = HEADS if width == demo["n_embd"] else width // HEAD_SIZE
    config = demo | {"n_embd": width, "n_layer": layers, "n_head": heads}
    (directory / "config.json").write_text(json.dumps(config))
    save_file(weights, directory / "model.safetensors", {"format": "pt"})


def demo_weights() -> Weights:
    """Return the demo model's weights."""
    return {n: np.asarray(v) for n, v in load_file(DEMO / "model.safetensors").items()}
