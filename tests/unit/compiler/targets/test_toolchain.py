"""Toolchains: the flags, variables and descriptions that a target is compiled with."""

import base64
from dataclasses import replace

import pytest
from tests.unit.compiler.toolchains import HOST, L4, V3, for_gpu, new, old

from prejit.compiler.targets.target_classes import catalogue
from prejit.compiler.targets.target_table import target
from prejit.compiler.targets.toolchain import gpu_config, read_tuning
from prejit.runtime.device.tuning import Tuning, write
from prejit.runtime.errors import BuildError, RejectError, StoreError
from prejit.runtime.machine.fingerprint import Fingerprint

OURS = "--xla_cpu_parallel_codegen_split_count=1"


def test_flags_may_come_from_a_file_and_an_old_jaxlibs_limit_is_last(tmp_path):
    users = {"XLA_FLAGS": " --xla_a=1  --xla_cpu_max_isa=AMX "}
    limited = f"{OURS} --xla_a=1 --xla_cpu_max_isa=AMX --xla_cpu_max_isa=AVX2"
    assert old(V3).xla_flags(users) == limited
    assert old(HOST).xla_flags({}) == new(V3).xla_flags({}) == OURS
    assert (for_gpu().plugin, new(V3).plugin) == ("jax-cuda13-pjrt 0.12.0", None)
    flags = tmp_path / "flags"
    flags.write_text("--xla_a=1\n--xla_b=2\n")
    found = new(HOST).xla_flags({"XLA_FLAGS": str(flags)})
    assert found == f"{OURS} --xla_a=1 --xla_b=2"
    with pytest.raises(StoreError, match="cannot read the file that XLA_FLAGS names"):
        new(V3).xla_flags({"XLA_FLAGS": str(tmp_path / "none")})


def test_tuning_is_read_for_the_device_that_it_was_measured_on(tmp_path):
    found = {"platform": "cuda", "compute_capability": "8.9", "device_kind": "NVIDIA L4"}
    measured = replace(Fingerprint.current(), **found)
    path = tmp_path / "l4.json"
    results, topology = (base64.b64encode(x).decode() for x in (b"results", b"topology"))
    write(Tuning(measured, topology, results), path)
    tuned = read_tuning(replace(L4, tuning=str(path)))
    assert (tuned.results, tuned.topology) == (b"results", topology)
    assert read_tuning(L4) is None
    with pytest.raises(BuildError, match=r"expected tuning for compute capability 9\.0 .* 8\.9"):
        read_tuning(replace(target("cuda-h100"), tuning=str(path)))
    damaged = path.read_bytes().replace(results.encode(), b"!")
    for content, complaint in ((damaged, "expected base64"), (b"{}", "expected an object|missing")):
        path.write_bytes(content)
        with pytest.raises(RejectError, match=complaint):
            read_tuning(replace(L4, tuning=str(path)))
    path.unlink()
    with pytest.raises(StoreError, match="cannot read tuning results"):
        read_tuning(replace(L4, tuning=str(path)))


def test_a_worker_inherits_what_does_not_change_its_result_and_xla_knows_each_gpu():
    inherited = {"PATH": "/bin", "NPROC": "3", "JAX_PLATFORMS": "tpu", "PYTHONPATH": "/ours"}
    assert (
        new(V3).environment(inherited).items()
        >= {
            **{
                "PATH": "/bin",
                "JAX_PLATFORMS": "cpu",
                "PYTHONHASHSEED": "0",
                "PYTHONPATH": "/ours",
            },
            "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0",
        }.items()
    )
    assert "NPROC" not in new(V3).environment(inherited)
    own = new(V3).environment({"GLIBC_TUNABLES": "glibc.malloc.perturb=1"})["GLIBC_TUNABLES"]
    assert own == "glibc.malloc.perturb=1:glibc.malloc.tcache_count=0"
    assert "PYTHONPATH" not in for_gpu().environment(inherited), "it would bring the host's jax"
    for on in (each for each in catalogue().values() if each.platform == "cuda"):
        text = gpu_config(on)
        assert f'device_description_str: "{on.device_kind}"' in text
        major, minor = (on.compute_capability or "").split(".")
        assert f"cuda_compute_capability {{ major: {major} minor: {minor} }}" in text
        assert "None" not in text
