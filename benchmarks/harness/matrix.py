"""Manifests with as many small programs as a study asks for: functions and models, x buckets x targets x jax.

The models are decoders with two layers and random weights, in the layout of transformers. None is an encoder:
the bundle of one holds times that a machine has measured, so two machines make different ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.parity.cases import Case

FUNCTIONS = '''"""Functions of several kinds; each compiles in a fraction of a second."""

import jax
import jax.numpy as jnp


def scale(x):
    return x * 2 + 1


def normalize(x):
    return (x - x.mean()) / jnp.sqrt(x.var() + 1e-6)


def distances(x):
    return jnp.sqrt(((x[:, None] - x[None, :]) ** 2))


def perceptron(x):
    hidden = x[:, None] * jnp.linspace(-1, 1, 32)
    for width in (32, 16):
        hidden = jax.nn.gelu(hidden @ jnp.full((hidden.shape[1], width), 0.1))
    return hidden.sum(-1)


def transformer(x):
    """A transformer of two layers and one head, without trained weights."""
    hidden = x[:, None] * jnp.cos(jnp.arange(16.0))
    for _ in range(2):
        scores = jax.nn.softmax(hidden @ hidden.T / 4)
        hidden = hidden + scores @ hidden
        hidden = hidden + jax.nn.relu(hidden @ jnp.full((16, 64), 0.01)) @ jnp.full((64, 16), 0.01)
    return hidden.mean(-1)
'''
NAMES = ("scale", "normalize", "distances", "perceptron", "transformer")
"""The functions of the project."""
TARGETS = ("cpu-x86-64-v2", "cpu-x86-64-v3", "cpu-x86-64-v4")
"""Targets that every x86 machine compiles for."""
LARGE = 200
"""From this number of programs on, models have several buckets."""
_DECODERS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": 48,
        "n_positions": 128,
        "n_embd": 24,
        "n_head": 3,
        "n_layer": 2,
        "n_inner": None,
        "activation_function": "gelu_new",
        "tie_word_embeddings": True,
    },
    "llama": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 48,
        "hidden_size": 24,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 128,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    },
}
_DECODERS["mistral"] = {
    **_DECODERS["llama"],
    "model_type": "mistral",
    "architectures": ["MistralForCausalLM"],
    "sliding_window": 7,
}


def write_matrix(
    directory: Path,
    programs: int,
    *,
    targets: Sequence[str] = TARGETS,
    jax_versions: Sequence[str | None] = (None,),
) -> list[Path]:
    """Write manifests of at least so many programs x targets, with what they are built from.

    Args:
        directory: gets the manifests, a module of functions, and the directories of models.
        programs: minimum number of executables of functions; those of models come in addition.
        targets: names of targets.
        jax_versions: versions of jax that each target is compiled with; None: that of this environment.

    Returns:
        The paths of the manifests.
    """
    parts = []
    for version in jax_versions:
        pinned = "" if version is None else f'jax = "{version}"\n'
        parts += [f'[[target]]\nname = "{target}"\n{pinned}' for target in targets]
    ends = "\n".join(parts)
    directory.mkdir(parents=True, exist_ok=True)
    executables = len(NAMES) * len(targets) * len(jax_versions)
    buckets = list(range(1, 1 + -(-programs // executables)))
    (directory / "matrix_model.py").write_text(FUNCTIONS)
    tables = [
        f'[[program]]\nname = "{name}"\nfunction = "matrix_model:{name}"\n'
        f'args = {{ x = "float32[{{n}}]" }}\nbuckets = {{ n = {buckets} }}\n'
        for name in NAMES
    ]
    manifests = {"matrix": "\n".join(tables)}
    is_large = programs >= LARGE
    for name, config in _DECODERS.items():
        Case(name, config, seed=1).write(directory / name)
        batch, context = ([1, 2], [32, 64]) if is_large else ([1], [32])
        manifests[name] = (
            f'[model]\nsource = "{name}"\ndtype = "float32"\n'
            f"[generate]\nbatch = {batch}\nprompt = [8]\ncontext = {context}\n"
        )
    found = []
    for name, body in manifests.items():
        found.append(directory / f"{name}.toml")
        found[-1].write_text(f'[bundle]\nname = "{name}"\n{body}\n{ends}')
    return found
