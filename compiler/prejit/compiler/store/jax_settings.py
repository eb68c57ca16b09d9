"""The settings of jax that decide what a function lowers to, as an ingredient of keys."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

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
