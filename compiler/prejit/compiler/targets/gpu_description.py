"""XLA's description of a GPU, to compile for a GPU that this machine lacks."""

from __future__ import annotations

from prejit.runtime.machine.targets import Target, capabilities


def gpu_config(target: Target) -> str:
    """Return XLA's description of a GPU: a GpuTargetConfigProto as text.

    The fields are those of xla/stream_executor/device_description.proto. Limits that all GPUs since compute
    capability 7.0 share are from the CUDA C++ Programming Guide.
    """
    gpu, shared = target.gpu, capabilities()[target.compute_capability or ""]
    assert gpu is not None
    major, minor = (target.compute_capability or "").split(".")
    limits = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 49152,
        "shared_memory_per_core": shared.shared_bytes_per_core,
        "shared_memory_per_block_optin": shared.shared_bytes_per_block_optin,
        "threads_per_core_limit": shared.threads_per_core,
        "core_count": gpu.core_count,
        "fpus_per_core": shared.fpus_per_core,
        "block_dim_limit_x": 2147483647,
        "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535,
        "memory_bandwidth": gpu.bandwidth_bytes,
        "l2_cache_size": gpu.l2_bytes,
        "clock_rate_ghz": gpu.clock_mhz / 1000,
        "device_memory_size": target.memory_bytes,
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
    }
    lines = [f"  {name}: {value}" for name, value in limits.items()]
    return "\n".join(
        (
            "gpu_device_info {",
            *lines,
            f"  cuda_compute_capability {{ major: {major} minor: {minor} }}",
            "}",
            'platform_name: "CUDA"',
            "dnn_version_info { major: 9 minor: 12 }",  # the lowest cuDNN that jax's plugin takes
            f'device_description_str: "{target.device_kind}"',
        )
    )
