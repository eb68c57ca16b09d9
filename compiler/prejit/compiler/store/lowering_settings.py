"""The settings of jax that decide what a function lowers to, as an ingredient of keys.

A setting counts unless it is known to decide nothing: one that a new jax adds is in keys from the first day.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from prejit.runtime.device.jax_settings import TRACED, plain
from prejit.runtime.errors import UsageError

COUNTED: Mapping[str, bool | int | float | str | None] = {
    **TRACED,
    "jax2tf_associative_scan_reductions": False,
    "jax2tf_default_native_serialization": True,
    "jax_bcoo_cusparse_lowering": False,
    "jax_compiler_enable_remat_pass": True,
    "jax_debug_infs": False,
    "jax_debug_nans": False,
    "jax_disable_bwd_checks": False,
    "jax_disable_jit": False,
    "jax_disable_most_optimizations": False,
    "jax_disable_vmap_shmap_error": False,
    "jax_disallow_mesh_context_manager": False,
    "jax_enable_checks": False,
    "jax_exec_time_optimization_effort": 0.0,
    "jax_experimental_unsafe_xla_runtime_errors": False,
    "jax_export_calling_convention_version": 10,
    "jax_export_deserialize_expired_versions": False,
    "jax_export_ignore_forward_compatibility": False,
    "jax_hlo_source_file_canonicalization_regex": None,
    "jax_include_full_tracebacks_in_locations": True,
    "jax_memory_fitting_effort": 0.0,
    "jax_memory_fitting_level": "O2",
    "jax_mosaic_allow_hlo": False,
    "jax_mosaic_unzip_debug_locations": True,
    "jax_no_tracing": False,
    "jax_num_cpu_devices": -1,
    "jax_optimization_level": "UNKNOWN",
    "jax_pallas_auto_assign_collective_ids": "no",
    "jax_pallas_auto_assign_collective_ids_limit": 25,
    "jax_pallas_poison_buffers": False,
    "jax_ragged_dot_use_ragged_dot_instruction": True,
    "jax_refs_to_pins": False,
    "jax_serialization_version": 0,
    "jax_sort_devices_by_process_index": True,
    "jax_source_url_schema": None,
    "jax_use_magma": "auto",
    "jax_use_rgv3": True,
}
"""The settings that count, with their defaults in jax 0.10 to 0.12. Only other values are in keys."""
HARMLESS = frozenset(
    """
    exclude_test_targets jax_array_garbage_collection_guard jax_backend_target
    jax_captured_constants_report_frames jax_captured_constants_warn_bytes jax_check_proxy_envs
    jax_check_tracer_leaks jax_compilation_cache_check_contents jax_compilation_cache_dir
    jax_compilation_cache_expect_pgle jax_compilation_cache_include_metadata_in_key
    jax_compilation_cache_max_size jax_compiler_detailed_logging_min_ops
    jax_cpu_collectives_implementation jax_cpu_enable_async_dispatch
    jax_cpu_get_global_topology_timeout_minutes jax_cpu_get_local_topology_timeout_minutes
    jax_cross_host_transfer_socket_address jax_cross_host_transfer_timeout_seconds
    jax_cross_host_transfer_transfer_size jax_cross_host_transport_addresses
    jax_cuda_visible_devices jax_debug_leaked_clients_on_clear_backends jax_debug_log_modules
    jax_default_device jax_distributed_debug jax_distributed_verify_secure_credentials
    jax_dump_ir_modes jax_dump_ir_to jax_enable_compilation_cache jax_enable_pgle
    jax_enable_preemption_service jax_enable_recoverability jax_explain_cache_misses
    jax_force_dcn_cross_host_transfers jax_include_debug_info_in_dumps
    jax_log_checkpoint_residuals jax_log_compiles jax_logging_level jax_mock_gpu_topology
    jax_mtls_ca_file jax_mtls_cert_file jax_mtls_key_file jax_mtls_peer_uri_prefix
    jax_num_generated_cases jax_oneapi_visible_devices
    jax_pallas_verbose_errors jax_persistent_cache_enable_xla_caches
    jax_persistent_cache_min_compile_time_secs jax_persistent_cache_min_entry_size_bytes
    jax_pgle_aggregation_percentile jax_pgle_profiling_runs jax_pjrt_client_create_options
    jax_platform_name jax_platforms jax_pprint_use_color jax_raise_persistent_cache_errors
    jax_remove_custom_partitioning_ptr_from_cache_key jax_rocm_visible_devices
    jax_send_traceback_to_runtime jax_share_binary_between_hosts
    jax_share_binary_between_hosts_timeout_ms jax_skip_slow_tests jax_test_dut
    jax_test_num_threads jax_test_with_persistent_compilation_cache jax_thread_guard
    jax_traceback_filtering jax_traceback_in_locations_limit
    jax_tracer_error_num_traceback_frames jax_transfer_guard jax_transfer_guard_device_to_device
    jax_transfer_guard_device_to_host jax_transfer_guard_host_to_device jax_use_cpp_shard_args
    jax_xla_backend jax_xla_profile_version max_cases_sampling_retries mock_num_gpu_processes
    test_targets
    jax_coordinator_address jax_coordinator_bind_address jax_coordinator_port jax_local_device_ids
    jax_partition_index jax_slice_index jax_force_tpu_init
    """.split()  # noqa: SIM905 (a list of 90 texts takes 90 lines)
)
"""Settings that decide no program: caches, logs, devices, transfers, clusters, tests of jax itself."""
_VARIABLES = {"jax_export_ignore_forward_compatibility": "JAX_EXPORT_IGNORE_FORWARD_COMPATIBILIY"}
"""Settings whose environment variable jax spells in another way (jax/_src/config.py)."""


_TRUTH = {
    **dict.fromkeys(("y", "yes", "t", "true", "on", "1"), True),
    **dict.fromkeys(("n", "no", "f", "false", "off", "0"), False),
}


def jax_configuration(environ: Mapping[str, str]) -> str:
    """Return the settings of jax that may decide what functions lower to, where they are not the defaults.

    They come from jax where it is imported, else from the environment variables that jax will read. A setting
    that is not known here counts with any value.

    Raises:
        UsageError: jax refuses the value of a variable.
    """
    jax: Any = sys.modules.get("jax")
    if jax is not None:
        found = {name: plain(value) for name, value in jax.config.values.items()}
    else:
        found = {
            name: _parsed(variable, environ[variable], default)
            for name, default in COUNTED.items()
            if (variable := _VARIABLES.get(name, name.upper())) in environ
        }
        variables = {*found, *COUNTED, *map(str.lower, _VARIABLES.values())}
        found |= {
            name.lower(): text
            for name, text in environ.items()
            if name.startswith("JAX_") and name.lower() not in variables
        }
    return " ".join(
        f"{name}={value}"
        for name, value in sorted(found.items())
        if name not in HARMLESS and not (name in COUNTED and COUNTED[name] == value)
    )


def _parsed(
    variable: str, text: str, default: bool | int | float | str | None
) -> bool | int | float | str:
    """Return a setting as jax reads it when it is imported (jax/_src/config.py)."""
    try:
        if isinstance(default, bool):
            return _TRUTH[text.lower()]
        return text if default is None else type(default)(text)
    except (KeyError, ValueError):
        kind = "true or false" if isinstance(default, bool) else "a number"
        raise UsageError(
            f"{variable}: expected {kind}, because jax reads this environment variable; found {text!r:.80}",
            hint=f"correct it, or unset it for {default}",
        ) from None
