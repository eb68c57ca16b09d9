"""Find the accelerators of this machine without starting them: no CUDA context, no TPU runtime, no JAX.

An accelerator counts only if its PJRT plugin is installed. Without the plugin jax runs on the CPU, and so
does prejit.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prejit.runtime.errors import PrejitWarning, UsageError

CUDA_PLUGINS = {
    # distribution: (the CUDA that it is built for, the distribution of that CUDA's runtime)
    "jax-cuda13-pjrt": ("13.0", "nvidia-cuda-runtime"),
    "jax-cuda12-pjrt": ("12.0", "nvidia-cuda-runtime-cu12"),
}


@dataclass(frozen=True, slots=True)
class Accelerator:
    """The accelerators that programs run on. Fields are those of `fingerprint.Fingerprint`."""

    platform: str
    plugin: str | None
    driver: str | None
    device_kind: str
    device_count: int
    device_memory_bytes: int | None
    cuda: str | None = None
    compute_capability: str | None = None
    topology: str | None = None


@dataclass(frozen=True, slots=True)
class _Chip:
    """A generation of TPUs: jax's name for it, dimensions of a topology, devices that jax sees in a chip.

    `accelerator_types`: beginnings of TPU_ACCELERATOR_TYPE. `memory_bytes`: as in the catalogue of targets,
    because only the TPU runtime can report it.
    """

    kind: str
    dimensions: int
    devices: int
    accelerator_types: tuple[str, ...]
    memory_bytes: int | None = None


_GOOGLE = "0x1ae0"
_CHIPS = {
    # PCI device (jax/_src/hardware_utils.py)
    "0x005e": _Chip("TPU v4", 3, 1, ("v4",)),
    "0x0062": _Chip("TPU v5", 3, 1, ("v5p",), 102_000_000_000),
    "0x0063": _Chip("TPU v5 lite", 2, 1, ("v5litepod", "v5e"), 16_900_000_000),
    "0x006f": _Chip("TPU v6 lite", 2, 1, ("v6e",), 33_500_000_000),
    "0x0076": _Chip("TPU7x", 3, 2, ("tpu7x",)),
}
_TOPOLOGIES = {
    # (dimensions, chips of one host): cloud.google.com/tpu/docs/system-architecture-tpu-vm
    **{(2, 1): "1x1", (2, 2): "1x2", (2, 4): "2x2", (2, 8): "2x4"},
    **{(3, 1): "1x1x1", (3, 2): "1x2x1", (3, 4): "2x2x1"},
}


def find_accelerator(environ: Mapping[str, str], root: Path = Path("/")) -> Accelerator | None:
    """Return the accelerator that jax would choose; None: the CPU.

    jax prefers a TPU to a GPU to the CPU (`cloud_tpu_init` and the priorities of its plugins), or takes the
    first platform in JAX_PLATFORMS that exists. On a machine without accelerators this takes less than a
    millisecond. `root` holds `dev`, `proc` and `sys`.

    Raises:
        UsageError: no platform in JAX_PLATFORMS exists. jax fails too.
    """
    finders: dict[str, Callable[[Mapping[str, str], Path], Accelerator | None]] = {
        "tpu": _find_tpu,
        "cuda": _find_cuda,
        "gpu": _find_cuda,
    }
    asked = environ.get("JAX_PLATFORMS", "")
    names = [name.strip() for name in asked.split(",")] if asked else ["tpu", "cuda", "cpu"]
    for name in names:
        if name == "cpu":
            return None
        if name in finders and (found := finders[name](environ, root)):
            return found
    raise UsageError(
        f"JAX_PLATFORMS: expected a platform of this machine, found {asked!r:.80}",
        hint="unset JAX_PLATFORMS, or set it to cpu; a GPU or TPU counts where jax's plugin for it is "
        "installed, as with: pip install 'prejit[cuda]'",
    )


def _plugin(*distributions: str) -> tuple[str, str] | None:
    """Return name and version of the first of these distributions that is installed."""
    from importlib import metadata  # takes 15 ms, so only if there may be an accelerator

    for name in distributions:
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


# CUDA


def _find_cuda(environ: Mapping[str, str], root: Path) -> Accelerator | None:
    if not any(os.path.exists(root / path) for path in ("dev/nvidiactl", "proc/driver/nvidia")):
        return None
    plugin = _plugin(*CUDA_PLUGINS)
    if plugin is None:
        return None
    try:
        import pynvml
    except ImportError:
        _warn_unknown_gpu(" ".join(plugin), "nvidia-ml-py is not installed")
        return None
    try:
        pynvml.nvmlInit()
        try:
            devices = _visible_devices(pynvml, environ.get("CUDA_VISIBLE_DEVICES"))
            return _describe_gpus(pynvml, devices, plugin) if devices else None
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        _warn_unknown_gpu(" ".join(plugin), f"the driver reports: {error}")
        return None


def _warn_unknown_gpu(plugin: str, why: str) -> None:
    warnings.warn(
        f"cannot identify this machine's NVIDIA GPU for {plugin}: {why}. prejit treats the "
        "machine as one without a GPU. Install the missing package with: pip install 'prejit[cuda]'. "
        "If you do not want to use the GPU, set JAX_PLATFORMS=cpu.",
        PrejitWarning,
        stacklevel=4,
    )


def _describe_gpus(pynvml: Any, devices: list[Any], plugin: tuple[str, str]) -> Accelerator:
    """Return what all of these GPUs have: the lowest capability and the least memory."""
    boards = [_board_of(pynvml, device) for device in devices]
    cuda, runtime = CUDA_PLUGINS[plugin[0]]
    installed = _plugin(runtime)
    major, minor = min(pynvml.nvmlDeviceGetCudaComputeCapability(board) for board in boards)
    return Accelerator(
        platform="cuda",
        plugin=" ".join(plugin),
        driver=pynvml.nvmlSystemGetDriverVersion(),
        device_kind=pynvml.nvmlDeviceGetName(devices[0]),
        device_count=len(devices),
        device_memory_bytes=min(pynvml.nvmlDeviceGetMemoryInfo(d).total for d in devices),
        cuda=installed[1] if installed else cuda,
        compute_capability=f"{major}.{minor}",
    )


def _board_of(pynvml: Any, device: Any) -> Any:
    """Return the GPU that a device is a part of (MIG), or the device itself."""
    try:
        return pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device)
    except pynvml.NVMLError:  # it is a whole GPU
        return device


def _visible_devices(pynvml: Any, visible: str | None) -> list[Any]:
    """Return the GPUs that CUDA shows a process (CUDA C++ Programming Guide, "CUDA Environment Variables").

    CUDA_VISIBLE_DEVICES has indices, or UUIDs or their beginnings. CUDA ignores everything after the first
    invalid entry. NVML counts in the order of the bus and CUDA by default from the fastest, so an index may
    mean another GPU if the GPUs differ. A partitioned GPU (MIG) counts as a whole unless a part is named
    here.
    """
    handles = [
        pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())
    ]
    if visible is None:
        return handles
    chosen: dict[str, Any] = {}
    for entry in visible.split(","):
        name = entry.strip()
        if re.fullmatch("[0-9]+", name):
            found = handles[int(name) : int(name) + 1]
        elif name.startswith("MIG-"):
            found = _part(pynvml, name)
        elif name.startswith("GPU-"):
            found = [h for h in handles if pynvml.nvmlDeviceGetUUID(h).startswith(name)]
        else:
            found = []
        if len(found) != 1:
            break
        chosen[pynvml.nvmlDeviceGetUUID(found[0])] = found[0]
    return list(chosen.values())


def _part(pynvml: Any, uuid: str) -> list[Any]:
    """Return the part of a GPU (MIG) with that UUID; empty: there is none."""
    try:
        return [pynvml.nvmlDeviceGetHandleByUUID(uuid)]
    except pynvml.NVMLError:
        return []


# TPU


def _find_tpu(environ: Mapping[str, str], root: Path) -> Accelerator | None:
    from importlib.util import find_spec

    if find_spec("libtpu") is None:  # quicker than reading hundreds of PCI devices
        return None
    plugin = _plugin("libtpu")
    chips = _tpu_chips(root)
    if plugin is None or not chips:
        return None
    chip, count = chips[0], len(chips)
    visible = environ.get("TPU_VISIBLE_CHIPS", environ.get("TPU_VISIBLE_DEVICES"))
    if visible:
        count = min(count, len(visible.split(",")))
    topology = _TOPOLOGIES.get((chip.dimensions, count))
    kind = environ.get("TPU_ACCELERATOR_TYPE", "").partition("-")[0]
    # TPU_TOPOLOGY counts only if it is about these chips and this process uses all chips of its host.
    if not visible and (not kind or kind in chip.accelerator_types):
        topology = environ.get("TPU_TOPOLOGY") or topology
    return Accelerator(
        platform="tpu",
        plugin=" ".join(plugin),
        driver=None,  # libtpu brings its own, which has no version
        device_kind=chip.kind,
        device_count=count * chip.devices,
        device_memory_bytes=chip.memory_bytes,
        topology=topology,
    )


def _tpu_chips(root: Path) -> list[_Chip]:
    """Return the TPU chips on the PCI bus."""
    at = root / "sys/bus/pci/devices"
    try:
        devices = sorted(os.listdir(at))
    except OSError:
        return []
    found = []
    for device in devices:
        try:
            if (at / device / "vendor").read_text().strip() == _GOOGLE:
                found.append(_CHIPS.get((at / device / "device").read_text().strip()))
        except OSError:  # removed in the meantime
            continue
    return [chip for chip in found if chip is not None]
