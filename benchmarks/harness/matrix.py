"""Manifests with as many small programs as a study asks for: functions and models, x buckets x targets x jax.

The models are decoders with two layers and random weights, in the layout of transformers. None is an encoder:
the bundle of one holds times that a machine has measured, so two machines make different ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.parity.cases import cases

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
DECODERS = ("gpt2-01", "llama-00-default", "mistral-00-default")


def write_matrix(
    directory: Path,
    programs: int,
    *,
    jax_versions: Sequence[str | None] = (None,),
) -> list[Path]:
    """Write the manifest of functions, and one for each model.

    Args:
        directory: gets the manifests, a module of functions, and the directories of models.
        programs: minimum number of executables of functions; those of models come in addition.
        jax_versions: versions of jax that each target is compiled with; None: that of this environment.

    Returns:
        The paths of the manifests.
    """
    found = [write_functions(directory, programs, jax_versions=jax_versions)]
    batch, context = ([1, 2], [32, 64]) if programs >= LARGE else ([1], [32])
    for case in cases():
        if (name := case.name) not in DECODERS:
            continue
        case.write(directory / name)
        found.append(directory / f"{name}.toml")
        found[-1].write_text(
            f'[bundle]\nname = "{name}"\n[model]\nsource = "{name}"\ndtype = "float32"\n'
            f"[generate]\nbatch = {batch}\nprompt = [8]\ncontext = {context}\n"
            + _target_tables(TARGETS, jax_versions)
        )
    return found


def write_functions(
    directory: Path,
    programs: int,
    *,
    targets: Sequence[str] = TARGETS,
    jax_versions: Sequence[str | None] = (None,),
) -> Path:
    """Write a manifest of at least so many functions x buckets x targets, with the module of its functions.

    Args:
        directory: gets `matrix.toml` and `matrix_model.py`.
        programs: minimum number of executables.
        targets: names of targets.
        jax_versions: versions of jax that each target is compiled with; None: that of this environment.

    Returns:
        The path of the manifest.
    """
    executables = len(NAMES) * len(targets) * len(jax_versions)
    buckets = list(range(1, 1 + -(-programs // executables)))
    parts = ['[bundle]\nname = "matrix"\n']
    for name in NAMES:
        parts.append(
            f'[[program]]\nname = "{name}"\nfunction = "matrix_model:{name}"\n'
            f'args = {{ x = "float32[{{n}}]" }}\nbuckets = {{ n = {buckets} }}\n'
        )
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "matrix_model.py").write_text(FUNCTIONS)
    manifest = directory / "matrix.toml"
    manifest.write_text("\n".join([*parts, _target_tables(targets, jax_versions)]))
    return manifest


def _target_tables(targets: Sequence[str], jax_versions: Sequence[str | None]) -> str:
    tables = []
    for version in jax_versions:
        pinned = "" if version is None else f'jax = "{version}"\n'
        tables += [f'[[target]]\nname = "{target}"\n{pinned}' for target in targets]
    return "\n".join(tables)
