"""The XLA flags and environment variables that change what an executable computes."""

from __future__ import annotations

from collections.abc import Mapping

from prejit.runtime.errors import StoreError

_FLAGS_WITHOUT_EFFECT = (
    # Prefixes of XLA flags that change neither results nor speed of executables
    # (xla/debug_options_flags.cc).
    *(
        "--xla_dump",
        "--xla_hlo_profile",
        "--xla_backtrace",
        "--xla_vlog",
        "--xla_gpu_cuda_data_dir",
    ),
    "--xla_cpu_parallel_codegen_split_count",  # set by prejit: the order of kernels in the file
    "--xla_force_host_platform_device_count",  # compared as the axis device_count
    *("--xla_gpu_dump_autotune", "--xla_gpu_load_autotune", "--xla_gpu_per_fusion_autotune_cache"),
    "--xla_cpu_max_isa",  # compared as the axis cpu_features
)
_ENVIRONMENT = {
    # Variables of each platform that change results or speed of compiled code.
    "cpu": (),
    # cuBLAS: TF32 for float32 products, and its deterministic mode (cuBLAS documentation).
    "cuda": ("CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE"),
    "tpu": ("LIBTPU_INIT_ARGS",),  # flags of the TPU's compiler and runtime
}
_SET_BY_JAX = " --xla_tpu_use_enhanced_launch_barrier=true"
"""The flag that `import jax` appends to LIBTPU_INIT_ARGS on a TPU (jax/_src/cloud_tpu_init.py). It is
removed, so that a machine has the same fingerprint before and after the import."""


def effective_xla_flags(flags: str) -> tuple[str, ...]:
    """Return the XLA flags that change results or speed, sorted; of several with one name the last."""
    named = {flag.partition("=")[0]: flag for flag in flags.split() if flag.startswith("--")}
    return tuple(
        sorted(flag for flag in named.values() if not flag.startswith(_FLAGS_WITHOUT_EFFECT))
    )


def effective_environment(platform: str, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the variables that change results or speed on a platform, as NAME=value, sorted."""
    values = {name: environ.get(name, "") for name in _ENVIRONMENT[platform]}
    values = {name: value.replace(_SET_BY_JAX, "").strip() for name, value in values.items()}
    return tuple(f"{name}={value}" for name, value in sorted(values.items()) if value)


def read_xla_flags(environ: Mapping[str, str]) -> str:
    """Return the flags in XLA_FLAGS, which holds flags or the name of a file with flags.

    Raises:
        StoreError: the file cannot be read.
    """
    flags = environ.get("XLA_FLAGS", "").strip()
    if not flags or flags.startswith("-"):
        return flags
    try:
        with open(flags, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise StoreError(
            f"{flags}: cannot read the file that XLA_FLAGS names: {error}",
            hint="set XLA_FLAGS to flags, which start with --, or to a file with flags",
        ) from error
