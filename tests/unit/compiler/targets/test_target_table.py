"""Targets: what the tables of a manifest mean, and what this machine can build."""

import json
import platform
from dataclasses import replace

import pytest

from prejit.compiler.targets import build_host, target_table
from prejit.compiler.targets.build_host import can_build
from prejit.compiler.targets.target_classes import capabilities, catalogue, chips
from prejit.compiler.targets.target_table import chosen, names, resolve, target
from prejit.runtime.base.typed_json import from_json, to_json
from prejit.runtime.errors import UsageError
from prejit.runtime.format.arrays import Mesh
from prejit.runtime.machine.fingerprint import CPU_FEATURES, Fingerprint, Requirement

L4 = Fingerprint(
    **{"platform": "cuda", "architecture": "x86_64", "cpu_features": ("avx2", "sse2")},
    **{"jaxlib": "0.11.2", "cpu_model": "Some CPU", "cpu_count": 8, "memory_bytes": 1 << 36},
    **{"plugin": "jax-cuda13-pjrt 0.11.2", "cuda": "13.0", "driver": "580.95.05"},
    **{"device_kind": "NVIDIA L4", "compute_capability": "8.9", "device_count": 1},
    device_memory_bytes=24_000_000_000,
)


def table(**given):
    return target_table.TargetTable(**{"name": "mine", **given})


def wrong(given, at):
    with pytest.raises(target_table.TableError) as caught:
        resolve(given, at, None)
    return caught.value.key, str(caught.value)


def test_the_catalogue_says_all_that_its_platforms_need_and_who_builds_it(monkeypatch):
    assert [target(name).name for name in names()] == list(names())
    assert catalogue().keys() >= {
        *("cpu-x86-64-v2", "cpu-x86-64-v3", "cpu-x86-64-v4"),
        *("cuda-t4", "cuda-a10g", "cuda-l4", "cuda-a100", "cuda-h100", "cuda-h200", "cuda-b200"),
        *("tpu-v5e", "tpu-v5p", "tpu-v6e", "tpu-v5e-2x2", "tpu-v5p-2x2x1", "tpu-v6e-2x2"),
    }
    for found in catalogue().values():
        assert found.name.startswith(f"{found.platform}-")
        # A feature that a fingerprint cannot show would make every machine a mismatch.
        features = found.cpu_features or ()
        assert set(features) <= set(CPU_FEATURES)
        assert list(features) == sorted(features)
        if found.platform == "cuda":
            assert found.compute_capability in capabilities()
            assert all((found.gpu, found.driver, found.memory_bytes))
        if found.platform == "tpu":
            assert found.device_count == chips(found.topology)
            assert all((found.generation, found.memory_bytes))
        # Its requirement must be one that a bundle can hold.
        needs = found.requirement("0.12.0", plugin="libtpu 0.0.51", device_memory_bytes=1)
        assert from_json(Requirement, to_json(needs), "here") == needs
    v2, v3, v4 = (set(target(f"cpu-x86-64-v{level}").cpu_features or ()) for level in (2, 3, 4))
    assert v2 < v3 < v4
    assert v4 - v3 == {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}
    host = target("cpu-host")
    assert (host.cpu, host.cpu_features, host.xla_max_isa) == (None, None, None)
    assert host.architecture == platform.machine()
    assert can_build(host) is None
    with pytest.raises(UsageError) as caught:
        target("cpu-x86-v3")
    assert "expected a target, one of cpu-host, cpu-x86-64-v2," in str(caught.value)
    assert caught.value.hint == "did you mean 'cpu-x86-64-v3'?"
    other = replace(target("cpu-x86-64-v3"), architecture="s390x")
    assert can_build(other) == f"it needs a build host with s390x, this is {platform.machine()}"
    needs = {"architecture": platform.machine(), "cpu_features": ("sse2", "warp")}
    wanted = replace(target("cpu-x86-64-v2"), **needs)
    have = replace(Fingerprint.current(), cpu_features=("sse2",))
    monkeypatch.setattr(Fingerprint, "current", lambda: have)
    reason = (
        "it needs jaxlib 0.11 or later on this machine: 0.10.2 compiles only for the build"
        " host's own CPU, which lacks warp"
    )
    for jaxlib, pinned, expected in (
        *(("0.10.2", None, reason), ("0.12.0", "0.10.2", reason), ("0.11.0", None, None)),
        *(("0.12.0.1", None, None), ("1.0.0", None, None), ("0.10.2", "0.11.2", None)),
    ):
        monkeypatch.setattr(build_host, "jaxlib_version", lambda found=jaxlib: found)
        assert can_build(replace(wanted, jax=pinned)) == expected


def test_a_table_goes_before_the_catalogue_and_a_pin_into_the_name(tmp_path):
    def found(**given):
        return resolve(table(**given), tmp_path, None)

    own = found(name="cuda-l4", memory_bytes=20_000_000_000, xla_flags=("--xla_a=1",))
    assert (own.memory_bytes, own.xla_flags) == (20_000_000_000, ("--xla_a=1",))
    assert own.gpu == target("cuda-l4").gpu
    assert found(name="cpu-host", cpus=2).cpus == 2
    assert found(name="cpu-host") == target("cpu-host")
    pinned = found(name="cpu-x86-64-v3", jax="0.12.0.1")
    assert (pinned.name, pinned.jax) == ("cpu-x86-64-v3-jax0.12.0.1", "0.12.0.1")
    both = (target("cpu-x86-64-v3"), pinned)
    assert chosen(both, ["cpu-x86-64-v3"], "m.toml") == both
    assert chosen(both, ["cpu-x86-64-v3-jax0.12.0.1"], "m.toml") == (pinned,)
    with pytest.raises(UsageError, match=r"--target: expected a target of m\.toml, one of cpu"):
        chosen(both, ["cpu-x86-64-v4"], "m.toml")


def test_a_fingerprint_is_a_target_and_an_unknown_gpu_is_described(tmp_path):
    path = tmp_path / "web.json"
    path.write_bytes(to_json(L4))
    found = resolve(table(name="web", fingerprint="web.json"), tmp_path, None)
    assert (found.name, found.gpu) == ("web-jax0.11.2", target("cuda-l4").gpu)
    assert (found.memory_bytes, found.compute_capability) == (24_000_000_000, "8.9")
    here = Fingerprint.current()
    path.write_bytes(to_json(here))
    found = resolve(table(name="here", fingerprint="web.json"), tmp_path, None)
    assert (found.cpu_features, found.jax) == (here.cpu_features, here.jaxlib)
    assert found.cpu is not None
    path.write_text(json.dumps({"platform": "cpu"}))
    key, problem = wrong(table(fingerprint="web.json"), tmp_path)
    assert key == "fingerprint"
    assert "web.json" in problem
    given = {
        **{"platform": "cuda", "device_kind": "NVIDIA GeForce RTX 4090"},
        **{"compute_capability": "8.9", "memory_bytes": 25_000_000_000},
        "gpu": target_table.GpuTable(128, 1_008_000_000_000, 75_497_472, 2520),
    }
    assert resolve(table(**given), tmp_path, None).gpu.core_count == 128
    for missing in ("device_kind", "compute_capability", "memory_bytes", "gpu"):
        key, problem = wrong(table(**{**given, missing: None}), tmp_path)
        assert key == missing
        assert problem.startswith("missing; ")


def test_a_table_that_is_no_target_is_refused(tmp_path):
    for given, key, problem in (
        ({"name": "cuda-h1000"}, "name", 'unknown target "cuda-h1000" (did you mean "cuda-h100"?)'),
        ({"name": "a b", "platform": "cpu"}, "name", "expected letters, digits"),
        ({"platform": "gpu"}, "platform", "expected one of cpu, cuda, tpu"),
        ({"name": "cuda-l4", "platform": "cpu"}, "platform", 'expected "cuda", the platform of'),
        ({"name": "cpu-host", "jax": "latest"}, "jax", "expected a version"),
        ({"name": "cpu-host", "constraints": ("x @ https://h",)}, "constraints", "without a URL"),
        ({"name": "cpu-host", "tuning": "none.json"}, "tuning", 'expected a file at "none.json"'),
        ({"fingerprint": "none.json"}, "fingerprint", 'expected a file at "none.json"'),
        ({"platform": "cpu", "cpu_features": ("avx2",)}, "cpu", "missing; LLVM's name"),
        ({"name": "cpu-host", "cpus": 0}, "cpus", "expected 1 to 1024 CPUs, found 0"),
        ({"name": "cuda-l4", "cpus": 4}, "cpus", "expected no cpus, because the loops of cuda-l4"),
        ({"name": "tpu-v5e", "topology": "two"}, "topology", 'expected a topology such as "2x2"'),
        ({"name": "tpu-v5e-2x2"}, "name", "tpu-v5e-2x2 has 4 chips, and [mesh] needs 1"),
    ):
        found_key, found = wrong(table(**given), tmp_path)
        assert found_key == key
        assert problem in found
    assert resolve(table(name="tpu-v5e-2x2"), tmp_path, Mesh(1, 4)).device_count == 4
    assert resolve(table(name="cuda-h100"), tmp_path, Mesh(2, 4)).device_count == 8
