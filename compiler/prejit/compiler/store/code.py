"""Digests of our own code and of jax's configuration, as ingredients of keys.

A module decides a result together with all modules of prejit that it imports. They are found by
reading `import` statements, so a new import is in the keys without anyone adding it to a list. Nothing is
imported for it: a build that changes nothing imports neither jax nor flax.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import prejit.runtime

_ROOTS = {
    "prejit.compiler": Path(__file__).parents[1],
    "prejit.runtime": Path(prejit.runtime.__file__).parent,
}

# Each begins with plain text, which `re` looks for fast.
_FROM = re.compile(r"from (prejit\.[\w.]+) import (\([^)]*\)|[^(\n]+)")
_IMPORT = re.compile(r"import (prejit\.[\w.]+)")
_NOT_RUN = re.compile(r"\nif TYPE_CHECKING:.*\n(?:[ ]+.*\n|\n)+")

COMPILING = ("prejit.compiler.compile.compiling",)
"""The module that makes an executable of a program."""
LOWERING = (
    "prejit.compiler.lowering.decoder",
    "prejit.compiler.lowering.encoder",
    "prejit.compiler.models.config_file",
)
"""The modules that make programs of a model."""
WEIGHTS = (
    "prejit.compiler.checkpoint.checkpoint",
    "prejit.compiler.build.packaging",
    "prejit.compiler.models.registry",
)
"""The modules that make the weights layer of a checkpoint."""
ACCURACY = ("prejit.compiler.build.accuracy", "prejit.compiler.checkpoint.checkpoint")
"""The modules that measure what dtypes cost."""

_JAX_DEFAULTS: Mapping[str, bool | int | str | None] = {
    "eager_constant_folding": False,
    "jax_allow_f16_reductions": True,
    "jax_default_matmul_precision": None,
    "jax_default_prng_impl": "threefry2x32",
    "jax_disable_jit": False,
    "jax_embedded_constants_max_bytes": 32,
    "jax_enable_custom_prng": False,
    "jax_enable_x64": False,
    "jax_error_checking_behavior_divide": "ignore",
    "jax_error_checking_behavior_nan": "ignore",
    "jax_error_checking_behavior_oob": "ignore",
    "jax_explicit_x64_dtypes": 1,
    "jax_export_calling_convention_version": 10,
    "jax_export_ignore_forward_compatibility": False,
    "jax_high_dynamic_range_gumbel": False,
    "jax_numpy_dtype_promotion": "standard",
    "jax_numpy_rank_promotion": "allow",
    "jax_random_seed_offset": 0,
    "jax_softmax_custom_jvp": False,
    "jax_threefry_gpu_kernel_lowering": False,
    "jax_threefry_partitionable": True,
    "jax_use_shardy_partitioner": True,
    "jax_use_simplified_jaxpr_constants": False,
}
"""The settings of jax that decide what a function lowers to, with the defaults of jax 0.10 to 0.12."""


@cache
def code_digest(*modules: str) -> str:
    """Return the digest of the sources of modules and of all modules of prejit that they import.

    Imports inside functions count; those under `if TYPE_CHECKING:` do not run and do not count.

    Args:
        modules: full names: `prejit.compiler.lowering.export`.
    """
    hasher = hashlib.sha256()
    for name in imported(*modules):
        source = _file(name).read_bytes()
        hasher.update(f"{name}\0{len(source)}\0".encode() + source)
    return f"sha256:{hasher.hexdigest()}"


@cache
def imported(*modules: str) -> tuple[str, ...]:
    """Return the full names of modules and of all modules of prejit that they import, sorted."""
    found = set[str]()
    left = list(modules)
    while left:
        if (name := left.pop()) not in found:
            found.add(name)
            left += _imports(name)
    return tuple(sorted(found))


def jax_configuration(environ: Mapping[str, str]) -> str:
    """Return the settings of jax that decide what functions lower to, where they are not the defaults.

    They come from jax where it is imported, else from the environment variables that jax will read.

    Args:
        environ: this process's environment variables.
    """
    jax: Any = sys.modules.get("jax")
    values = None if jax is None else jax.config.values
    changed = []
    for name, default in _JAX_DEFAULTS.items():
        found = (
            values.get(name, default)
            if values is not None
            else _from_environment(name, default, environ)
        )
        if found != default:
            changed.append(f"{name}={found}")
    return " ".join(changed)


def _from_environment(
    name: str, default: bool | int | str | None, environ: Mapping[str, str]
) -> bool | int | str | None:
    """Return a setting as jax reads it when it is imported (jax/_src/config.py)."""
    text = environ.get(name.upper())
    if text is None:
        return default
    if isinstance(default, bool):
        return text.lower() in ("y", "yes", "t", "true", "on", "1")
    if isinstance(default, int) and text.lstrip("-").isdecimal():
        return int(text)
    return text


@cache
def _imports(module: str) -> tuple[str, ...]:
    """The modules of prejit that a module imports itself, and the packages that hold them.

    A text in quotes that looks like an import counts too, which does no harm. `ast` tells them apart, but
    takes 0.3 s for all modules, more than the rest of a build that changes nothing.
    """
    text = _NOT_RUN.sub("\n", _file(module).read_text("utf-8"))
    named = set[str](_IMPORT.findall(text))
    for package, names in _FROM.findall(text):
        named.add(package)
        named.update(f"{package}.{name}" for name in re.findall(r"\w+", names))
    packages = {name.rpartition(".")[0] for name in named}
    return tuple(sorted(name for name in named | packages if _is_module(name)))


def _is_module(name: str) -> bool:
    return any(name.startswith(f"{root}.") for root in _ROOTS) and _file(name).is_file()


def _file(module: str) -> Path:
    """The source file of a module of prejit; a name of something else gives a path without a file."""
    root = next(root for root in _ROOTS if module.startswith(f"{root}."))
    place = _ROOTS[root].joinpath(*module.removeprefix(f"{root}.").split("."))
    return place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
