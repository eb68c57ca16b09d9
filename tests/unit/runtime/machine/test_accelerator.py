"""Accelerators: what jax would choose, told from the bus and the driver, without starting any of it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import pynvml
import pytest

from prejit.compiler.targets.target_classes import catalogue
from prejit.runtime.errors import PrejitWarning, UsageError
from prejit.runtime.machine import accelerator
from prejit.runtime.machine.accelerator import Accelerator, find_accelerator
from prejit.runtime.machine.fingerprint import Fingerprint


@dataclass
class Gpu:
    """A GPU as NVML tells it."""

    name: str = "NVIDIA L4"
    capability: tuple[int, int] = (8, 9)
    total: int = 24_000_000_000
    uuid: str = "GPU-0000"
    part_of: Gpu | None = None


class FakeNvml(ModuleType):
    """The part of pynvml that we call; as strict as NVML itself about what a handle may be asked."""

    def __init__(self, gpus, parts):
        super().__init__("pynvml")
        self.open = 0

        def count(change):
            self.open += change

        def known(found, error):
            if not found:
                raise pynvml.NVMLError(error)
            return found[0]

        def by_uuid(uuid):
            found = [gpu for gpu in (*gpus, *parts) if gpu.uuid == uuid]
            return known(found, pynvml.NVML_ERROR_NOT_FOUND)

        def whole_of(gpu):
            return known([gpu.part_of] * (gpu in parts), pynvml.NVML_ERROR_INVALID_ARGUMENT)

        def capability(gpu):
            return known([gpu.capability] * (gpu in gpus), pynvml.NVML_ERROR_NOT_SUPPORTED)

        self.NVMLError = pynvml.NVMLError
        self.nvmlInit, self.nvmlShutdown = lambda: count(1), lambda: count(-1)
        self.nvmlSystemGetDriverVersion = lambda: "580.95.05"
        self.nvmlDeviceGetCount = lambda: len(gpus)
        self.nvmlDeviceGetHandleByIndex = gpus.__getitem__
        self.nvmlDeviceGetHandleByUUID = by_uuid
        self.nvmlDeviceGetDeviceHandleFromMigDeviceHandle = whole_of
        self.nvmlDeviceGetUUID = lambda gpu: gpu.uuid
        self.nvmlDeviceGetName = lambda gpu: gpu.name
        self.nvmlDeviceGetCudaComputeCapability = capability
        self.nvmlDeviceGetMemoryInfo = lambda gpu: SimpleNamespace(total=gpu.total)


class Box:
    """A machine made of files, and what is installed on it."""

    def __init__(self, root, monkeypatch):
        self.root, self.monkeypatch = root, monkeypatch
        self.packages = self.root / "site-packages"
        self.packages.mkdir(parents=True)
        self.monkeypatch.syspath_prepend(str(self.packages))

    def install(self, name, version):
        folder = self.packages / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        described = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (folder / "METADATA").write_text(described)
        if name == "libtpu":
            (self.packages / "libtpu.py").touch()
        self.monkeypatch.syspath_prepend(str(self.packages))  # tells the import system to look anew

    def add_gpus(self, *gpus, parts=()):
        (self.root / "dev").mkdir(exist_ok=True)
        (self.root / "dev/nvidiactl").touch()
        nvml = FakeNvml([*gpus], [*parts])
        self.monkeypatch.setitem(sys.modules, "pynvml", nvml)
        return nvml

    def add_pci(self, vendor, *devices):
        for number, device in enumerate(devices):
            at = self.root / f"sys/bus/pci/devices/0000:{vendor[2:]}:{number:02}.0"
            at.mkdir(parents=True)
            (at / "vendor").write_text(f"{vendor}\n")
            (at / "device").write_text(f"{device}\n")

    def find(self, **environ):
        return find_accelerator(environ, self.root)


@pytest.fixture
def box(tmp_path, monkeypatch):
    return Box(tmp_path, monkeypatch)


def test_devices_without_a_plugin_or_the_reverse_do_not_count(box):
    """jax would run on the CPU as well."""
    box.add_gpus(Gpu())
    box.add_pci("0x1ae0", "0x0063")
    assert box.find() is None
    empty = Box(box.root / "empty", box.monkeypatch)
    for name in ("jax-cuda13-pjrt", "libtpu"):
        empty.install(name, "1.0")
    assert empty.find() is None
    (empty.root / "sys/bus/pci/devices").mkdir(parents=True)
    assert empty.find() is None


def test_a_gpu_is_told_with_all_that_compare_asks_for(box):
    box.install("jax-cuda13-pjrt", "0.12.0.1")
    box.install("nvidia-cuda-runtime", "13.0.96")
    nvml = box.add_gpus(Gpu(total=24_000_000_001), Gpu(uuid="GPU-1"))
    assert box.find() == Accelerator(
        platform="cuda",
        plugin="jax-cuda13-pjrt 0.12.0.1",
        driver="580.95.05",
        device_kind="NVIDIA L4",
        device_count=2,
        device_memory_bytes=24_000_000_000,
        cuda="13.0.96",
        compute_capability="8.9",
    )
    assert nvml.open == 0, "NVML is shut down again"


@pytest.mark.parametrize(
    ("plugin", "has_12", "cuda"),
    [
        ("jax-cuda13-pjrt", False, "13.0"),
        ("jax-cuda13-pjrt", True, "13.0"),
        ("jax-cuda12-pjrt", True, "12.9.79"),
    ],
)
def test_the_cuda_runtime_is_the_one_that_the_plugin_loads(plugin, has_12, cuda, box):
    box.install(plugin, "0.12.0.1")
    if has_12:
        box.install("nvidia-cuda-runtime-cu12", "12.9.79")
    box.add_gpus(Gpu())
    found = box.find()
    assert (found.plugin, found.cuda) == (f"{plugin} 0.12.0.1", cuda)


def test_cuda_visible_devices_hides_what_cuda_hides(box):
    """An empty list hides all; what follows the first that is none does not count."""
    box.install("jax-cuda13-pjrt", "0.12.0.1")
    box.add_gpus(*(Gpu(uuid=f"GPU-{name}") for name in ("a1", "a2", "b1")))
    counts = {"": 0, "-1": 0, "0": 1, "7": 0, "0,7,1": 1, "GPU-a1": 1, "GPU-a": 0, "0,GPU-b": 2}
    for visible, count in counts.items():
        found = box.find(CUDA_VISIBLE_DEVICES=visible)
        assert (found.device_count if found else 0) == count, visible


def test_unlike_gpus_and_parts_are_told_by_the_least_and_none_is_secret(box, monkeypatch):
    box.install("jax-cuda13-pjrt", "0.12.0.1")
    box.add_gpus(Gpu("NVIDIA H200", (9, 0), 150_000_000_000), Gpu("Tesla T4", (7, 5), 16, "GPU-1"))
    both, second = box.find(), box.find(CUDA_VISIBLE_DEVICES="1")
    assert (both.compute_capability, both.device_memory_bytes) == ("7.5", 16)
    assert (both.device_kind, second.device_kind) == ("NVIDIA H200", "Tesla T4")
    capabilities = [(10, 0), (9, 0)]  # as numbers: as text 10.0 would be less than 9.0
    box.add_gpus(*(Gpu(capability=c, uuid=f"GPU-{c}") for c in capabilities))
    found = box.find()
    assert found.compute_capability == "9.0"
    whole = Gpu("NVIDIA H100 80GB HBM3", (9, 0), 85_000_000_000)
    part = Gpu("NVIDIA H100 80GB HBM3 MIG 1g.10gb", (0, 0), 10_000_000_000, "MIG-1", whole)
    box.add_gpus(whole, parts=[part])
    found = box.find(CUDA_VISIBLE_DEVICES="MIG-1,MIG-unknown")
    assert (found.device_kind, found.compute_capability) == (part.name, "9.0")
    assert (found.device_count, found.device_memory_bytes) == (1, 10_000_000_000)
    monkeypatch.setitem(sys.modules, "pynvml", None)  # as where it is not installed
    with pytest.warns(PrejitWarning, match=r"NVIDIA GPU .*nvidia-ml-py is not installed.*\[cuda\]"):
        assert box.find() is None


def test_every_tpu_of_the_catalogue_is_found_as_it_stands_there(box):
    """Or no machine would ever load what was compiled for it."""
    box.install("libtpu", "0.0.51")
    ids = {chip.kind: pci for pci, chip in accelerator._CHIPS.items()}
    for number, target in enumerate(t for t in catalogue().values() if t.platform == "tpu"):
        machine = Box(box.root / str(number), box.monkeypatch)
        machine.add_pci("0x8086", "0x0063", "0x1237")  # Intel's device of the same number is no TPU
        # Google's network card is none either.
        machine.add_pci("0x1ae0", "0x0042", *[ids[target.device_kind or ""]] * target.device_count)
        found = machine.find()
        assert (found.platform, found.plugin) == ("tpu", "libtpu 0.0.51")
        for axis in ("device_kind", "topology", "device_count"):
            assert getattr(found, axis) == getattr(target, axis), axis
        assert (found.device_memory_bytes or 0) >= (target.memory_bytes or 0)


def test_variables_of_a_tpu(box):
    box.install("libtpu", "0.0.51")
    box.add_pci("0x1ae0", *["0x0063"] * 4)
    grid = {"TPU_TOPOLOGY": "4x4"}
    for environ, count, topology in (
        ({}, 4, "2x2"),
        (grid, 4, "4x4"),
        ({**grid, "TPU_ACCELERATOR_TYPE": "v5litepod-16"}, 4, "4x4"),
        ({"TPU_TOPOLOGY": "4x4x4", "TPU_ACCELERATOR_TYPE": "v5p-128"}, 4, "2x2"),
        ({"TPU_VISIBLE_CHIPS": "0"}, 1, "1x1"),
        ({"TPU_VISIBLE_CHIPS": "0", **grid}, 1, "1x1"),
    ):
        found = box.find(**environ)
        assert (found.device_count, found.topology) == (count, topology), environ


def test_jax_platforms_chooses_and_one_that_is_not_there_is_an_error(box):
    for name in ("jax-cuda13-pjrt", "libtpu"):
        box.install(name, "1.0")
    for platforms in ("tpu", "cuda,tpu", "gpuu", "CPU", ","):
        with pytest.raises(UsageError, match="JAX_PLATFORMS: expected a platform of this") as it:
            box.find(JAX_PLATFORMS=platforms)
        assert "JAX_PLATFORMS" in (it.value.hint or "")
    box.add_gpus(Gpu())
    box.add_pci("0x1ae0", "0x0063")
    assert box.find().platform == "tpu"
    choices = {"": "tpu", "cpu": None, "cuda": "cuda", "cuda,tpu": "cuda", "cpu,tpu": None}
    for platforms, chosen in {**choices, "rocm,cpu": None}.items():
        found = box.find(JAX_PLATFORMS=platforms)
        assert (found and found.platform) == chosen, platforms


def test_the_accelerator_is_in_the_fingerprint(box, monkeypatch):
    """Through the environment alone: what `current` calls is not replaced."""
    box.install("libtpu", "0.0.51")
    box.add_pci("0x1ae0", "0x0063")
    real = accelerator.find_accelerator
    monkeypatch.setattr(
        "prejit.runtime.machine.accelerator.find_accelerator",
        lambda environ: real(environ, box.root),
    )
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_x=1")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    before = Fingerprint.current()
    assert (before.platform, before.device_kind, before.topology) == ("tpu", "TPU v5 lite", "1x1")
    assert before.environment == ("LIBTPU_INIT_ARGS=--xla_tpu_x=1",)
    monkeypatch.setenv(  # what `import jax` does to it, jax/_src/cloud_tpu_init.py
        "LIBTPU_INIT_ARGS", "--xla_tpu_x=1 --xla_tpu_use_enhanced_launch_barrier=true"
    )
    assert Fingerprint.current() == before
    monkeypatch.setenv("TPU_TOPOLOGY", "two by two")
    with pytest.raises(UsageError, match="topology: expected the form of '2x2'"):
        Fingerprint.current()
