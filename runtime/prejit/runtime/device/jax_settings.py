"""The settings of jax by which it keys its traces: programs of a user fit only those of their build."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import numpy as np

from prejit.runtime.device import _jax_parts

TRACED: Mapping[str, bool | int | float | str | None] = {
    "check_vma": False,
    "eager_constant_folding": False,
    "jax_accurate_erf_inv": False,
    "jax_allow_f16_reductions": True,
    "jax_auto_pcast": True,
    "jax_check_static_indices": False,
    "jax_custom_jvp3": False,
    "jax_custom_vjp3": False,
    "jax_debug_key_reuse": False,
    "jax_default_matmul_precision": None,
    "jax_default_prng_impl": "threefry2x32",
    "jax_embedded_constants_max_bytes": 32,
    "jax_enable_custom_prng": False,
    "jax_enable_x64": False,
    "jax_error_checking_behavior_divide": "ignore",
    "jax_error_checking_behavior_nan": "ignore",
    "jax_error_checking_behavior_oob": "ignore",
    "jax_explicit_x64_dtypes": "warn",
    "jax_high_dynamic_range_gumbel": False,
    "jax_legacy_prng_key": "allow",
    "jax_mutable_array_checks": True,
    "jax_no_execution": False,
    "jax_numpy_dtype_promotion": "standard",
    "jax_numpy_rank_promotion": "allow",
    "jax_pallas_enable_debug_checks": False,
    "jax_pallas_use_mosaic_gpu": True,
    "jax_ragged_dot_use_gpu_pallas_triton_lowering": False,
    "jax_raise_on_ppermute_sort_diff": True,
    "jax_random_seed_offset": 0,
    "jax_remat3": False,
    "jax_remat_barrier_no_cotangents": False,
    "jax_remove_size_one_mesh_axis_from_type": False,
    "jax_scan3": False,
    "jax_softmax_custom_jvp": False,
    "jax_threefry_gpu_kernel_lowering": False,
    "jax_threefry_partitionable": True,
    "jax_use_direct_linearize": True,
    "jax_use_emit_pipeline_primitive": False,
    "jax_use_hlo_logistic_lowering": None,
    "jax_use_shardy_partitioner": True,
    "jax_use_simplified_jaxpr_constants": False,
}
"""Settings that a trace depends on, with their defaults in jax 0.10 to 0.12. Bundles hold only others."""
_CONTEXTS: Mapping[str, str] = {
    "compute_on_context_manager": "None",
    "jax_no_collectives": "frozenset",
    "layout_tracing_mode": "auto",
    "pallas_dynamic_shapes_export": "False",
    "pallas_fuser_disable_nested_fuse": "False",
    "pallas_grid_context": "None",
    "pallas_tpu_interpret_mode_context_manager": "None",
    "user_context": "None",
    "xla_metadata_context_manager": "None",
}
"""The same for what only context managers set."""
_DEFAULTS = {**{name: str(value) for name, value in TRACED.items()}, **_CONTEXTS}
_UNCOUNTED = frozenset(
    (
        *("mesh_context_manager", "abstract_mesh_context_manager", "axis_env_state"),
        *("jax_default_device", "jax_disable_jit", "jax_enable_pgle", "jax_pgle_profiling_runs"),
        *("jax_hlo_source_file_canonicalization_regex", "jax_xla_profile_version"),
    )
)
"""Parts of the key of a trace that change no value: where it runs, how it is profiled, the names of files."""


def to_record() -> dict[str, str]:
    """Return the settings of this thread that are not jax's defaults, as the program table holds them."""
    return {name: found for name, found in _now().items() if _DEFAULTS.get(name) != found}


def differing(recorded: Mapping[str, str] | None) -> str:
    """Return how the settings of this thread differ from those of a program's trace; empty: they do not.

    Args:
        recorded: what `to_record` returned when the program was traced; None: not known, and nothing
            differs. Settings that this version of jax does not have are not compared, nor those that neither
            the program table nor prejit knows.
    """
    if recorded is None:
        return ""
    return ", ".join(
        f"{name}: expected {expected}, found {found}"
        for name, found in _now().items()
        if (expected := recorded.get(name, _DEFAULTS.get(name, found))) != found
    )


def check_values(at: str, value: np.ndarray[Any, Any]) -> None:
    """Look for what jax_debug_nans and jax_debug_infs refuse.

    Raises:
        FloatingPointError: the value has one.
    """
    import jax

    if jax.numpy.issubdtype(value.dtype, jax.numpy.inexact):
        for name, is_one in (("nan", np.isnan), ("inf", np.isinf)):
            if getattr(jax.config, f"jax_debug_{name}s") and is_one(value).any():
                raise FloatingPointError(f"invalid value ({name}) encountered in {at}")


def plain(value: Any) -> Any:
    """Return a setting as environment variables spell it: an enumeration by its name."""
    return value.name.lower() if isinstance(value, Enum) else value


def _now() -> dict[str, str]:
    return {
        name: _text(plain(value))
        for name, value in _jax_parts.trace_settings().items()
        if name not in _UNCOUNTED
    }


def _text(value: Any) -> str:
    # Other objects are spelled by their class: their own texts may hold addresses.
    known = value is None or isinstance(value, bool | int | float | str)
    return str(value) if known else type(value).__qualname__
