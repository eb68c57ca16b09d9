"""What a target needs of a machine is what the compiler found; how long a portable program can be read."""

from dataclasses import replace
from importlib.metadata import version

import pytest

from prejit.compiler.compile.compile_jobs import Compiled
from prejit.compiler.manifest.manifest import Manifest
from prejit.compiler.native.kernel_library import KernelLibrary
from prejit.compiler.pipeline.pack.contents import readable_until, requirement_of
from prejit.compiler.targets.target_table import target
from prejit.compiler.targets.toolchain import host_toolchain
from prejit.runtime.errors import BuildError
from prejit.runtime.format.bundle_schema import Memory, Segment

VERSIONS = {"jax": "0.12.0", "jaxlib": "0.12.0", "jax-cuda13-pjrt": "0.12.0"}
MANIFEST = Manifest("m", targets=["cpu-host"])


def toolchain(name):
    return host_toolchain(target(name), VERSIONS)


def compiled(*features, need_bytes=0):
    memory = Memory(0, 0, 0, need_bytes)
    segment = Segment(0, 1, f"sha256:{0:064x}", 1, f"sha256:{1:064x}")
    return Compiled(segment, features, memory, 1, 1, 1)


def test_a_cpu_needs_what_any_program_uses_and_what_the_kernels_use():
    programs = {"a": compiled("avx2", "sse3"), "b": compiled("bmi")}
    alone = requirement_of(MANIFEST, toolchain("cpu-x86-64-v3"), programs, None)
    assert {"avx2", "bmi", "sse3"} <= set(alone.cpu_features or ())
    assert (alone.glibc, alone.device_memory_bytes) == (None, None)
    library = KernelLibrary("x86-64-v2", f"sha256:{2:064x}", 1, "g++ 12", "2.99", ("linear",))
    beside = requirement_of(MANIFEST, toolchain("cpu-x86-64-v3"), programs, library)
    assert set(alone.cpu_features or ()) < set(beside.cpu_features or ())
    assert "sse4.2" in (beside.cpu_features or ())
    assert beside.glibc == "2.99"
    assert readable_until("0.10.2") == "2026-12-14"
    assert readable_until("0.12.0.1") == "2027-04-18"
    assert readable_until("0.99.0") is None, "an unknown release promises nothing"
    assert readable_until(version("jax")) is not None, "that of today's environments is known"


def test_an_accelerator_needs_the_memory_of_its_largest_program():
    gpu = toolchain("cuda-l4")
    sizes = {"a": compiled(need_bytes=10**9), "b": compiled(need_bytes=3 * 10**9)}
    found = requirement_of(MANIFEST, gpu, sizes, None)
    assert found.device_memory_bytes == max(each.memory.need_bytes for each in sizes.values())
    small = replace(gpu, target=replace(gpu.target, memory_bytes=2 * 10**9))
    with pytest.raises(BuildError) as caught:
        requirement_of(MANIFEST, small, sizes, None)
    text = str(caught.value)
    assert "target cuda-l4: a device has 2.00 GB, and 1 of 2 programs need more" in text
    assert "\n  b: needs 3.00 GB: " in text
    assert caught.value.hint
