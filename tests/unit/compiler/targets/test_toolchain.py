"""What a target is compiled with, and its part of the key."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from prejit.compiler.store.directory import DirectoryStore
from prejit.compiler.targets import toolchain
from prejit.compiler.targets.target_table import target
from prejit.compiler.targets.toolchain import (
    Toolchain,
    Tuned,
    gpu_config,
    host_toolchain,
    read_tuning,
)
from prejit.runtime.device.tuning import Tuning, write
from prejit.runtime.errors import BuildError, RejectError, StoreError
from prejit.runtime.machine.catalogue import catalogue
from prejit.runtime.machine.fingerprint import Fingerprint
from prejit.runtime.machine.target import Target

OURS = "--xla_cpu_parallel_codegen_split_count=1"
V3 = target("cpu-x86-64-v3")
HOST = target("cpu-host")
L4 = target("cuda-l4")


def old(on: Target) -> Toolchain:
    """With a jaxlib that compiles for no described CPU."""
    return host_toolchain(on, {"jax": "0.10.2", "jaxlib": "0.10.2"})


def new(on: Target) -> Toolchain:
    return host_toolchain(on, {"jax": "0.12.0", "jaxlib": "0.12.0"})


def for_gpu(on: Target = L4) -> Toolchain:
    versions = (("jax", "0.12.0"), ("jax-cuda13-pjrt", "0.12.0"), ("jaxlib", "0.12.0"))
    return Toolchain(on, ("python",), versions, isolated=True)


def test_an_old_jaxlib_gets_the_limit_as_its_last_flag() -> None:
    users = {"XLA_FLAGS": " --xla_a=1  --xla_cpu_max_isa=AMX "}
    assert old(V3).xla_flags(users) == (
        f"{OURS} --xla_a=1 --xla_cpu_max_isa=AMX --xla_cpu_max_isa=AVX2"
    )
    assert old(HOST).xla_flags({}) == OURS


def test_a_new_jaxlib_gets_no_limit() -> None:
    assert new(V3).xla_flags({}) == OURS
    assert dict(new(V3).ingredients({}))["cpu"] == "x86-64-v3"


def test_the_hosts_features_are_in_the_key_where_they_get_into_the_code() -> None:
    found = dict(old(V3).ingredients({}))["cpu_features"]
    assert found == dict(old(HOST).ingredients({}))["cpu_features"]


def test_flags_may_come_from_a_file(tmp_path: Path) -> None:
    flags = tmp_path / "flags"
    flags.write_text("--xla_a=1\n--xla_b=2\n")
    found = new(HOST).xla_flags({"XLA_FLAGS": str(flags)})
    assert found == f"{OURS} --xla_a=1 --xla_b=2"
    with pytest.raises(StoreError, match="cannot read the file that XLA_FLAGS names"):
        new(V3).xla_flags({"XLA_FLAGS": str(tmp_path / "none")})


def test_users_flags_change_the_key_and_their_path_does_not(tmp_path: Path) -> None:
    flags = tmp_path / "flags"
    flags.write_text("--xla_a=1")
    given = new(V3).ingredients({"XLA_FLAGS": "--xla_a=1", "HOME": "/a"})
    assert given == new(V3).ingredients({"XLA_FLAGS": str(flags), "HOME": "/b"})
    assert given != new(V3).ingredients({})


def test_each_target_has_ingredients_of_its_own() -> None:
    found = [new(HOST), *(new(on) for on in catalogue().values() if on.platform == "cpu")]
    found += [for_gpu(on) for on in catalogue().values() if on.platform == "cuda"]
    assert len({one.ingredients({}) for one in found}) == len(found)


@pytest.mark.parametrize(
    "changed",
    [
        replace(L4, memory_bytes=1),
        replace(L4, xla_flags=("--xla_gpu_autotune_level=0",)),
        replace(L4, device_count=2),
        replace(L4, compute_capability="9.0"),
    ],
)
def test_whatever_describes_a_gpu_is_in_the_key(changed: Target) -> None:
    assert for_gpu(changed).ingredients({}) != for_gpu().ingredients({})


def test_how_a_gpu_is_described_to_xla_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit that all GPUs share is no field of a target."""
    before = for_gpu().ingredients({})
    monkeypatch.setattr(toolchain, "gpu_config", lambda on: f"{gpu_config(on)}\nmended: 1")
    assert for_gpu().ingredients({}) != before


def test_our_code_that_compiles_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = new(V3).ingredients({})
    monkeypatch.setattr(toolchain, "code_digest", lambda *modules: f"sha256:of mended {modules}")
    after = new(V3).ingredients({})
    assert after != before
    assert "prejit.compiler.compile.compiling" in dict(after)["our code"]


def test_flags_of_libtpu_are_in_the_key() -> None:
    versions = (("jax", "0.12.0"), ("jaxlib", "0.12.0"), ("libtpu", "0.0.51"))
    tpu = Toolchain(target("tpu-v5e"), ("python",), versions, isolated=True)
    assert tpu.ingredients({"LIBTPU_INIT_ARGS": "--xla_tpu_a=1"}) != tpu.ingredients({})
    assert new(V3).ingredients({"LIBTPU_INIT_ARGS": "--xla_tpu_a=1"}) == new(V3).ingredients({})


def test_names_of_targets_and_cores_of_the_build_host_are_in_no_key() -> None:
    renamed = replace(V3, name="web-servers")
    assert new(renamed).ingredients({}) == new(V3).ingredients({})
    host = os.sched_getaffinity(0)
    before = new(V3).ingredients({})
    os.sched_setaffinity(0, {min(host)})
    try:
        assert new(V3).ingredients({}) == before
    finally:
        os.sched_setaffinity(0, host)


def test_a_path_with_spaces_stays_one_flag() -> None:
    """XLA ends the process with unknown flags."""
    tuned = Tuned("/home/a user/.cache/x", "", "one")
    flags = replace(for_gpu(), tuned=tuned).xla_flags({})
    assert flags.endswith('--xla_gpu_load_autotune_results_from="/home/a user/.cache/x"')
    done = subprocess.run(
        [sys.executable, "-c", "from jaxlib import xla_client; xla_client.make_cpu_client()"],
        env={**os.environ, "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_version_that_compiles_is_in_the_key_and_where_it_is_installed_is_not() -> None:
    one = for_gpu()
    assert replace(one, command=("other",)).ingredients({}) == one.ingredients({})
    versions = (*one.versions[:2], ("jaxlib", "0.12.0.1"))
    assert replace(one, versions=versions).ingredients({}) != one.ingredients({})


def test_what_was_measured_counts_by_what_it_says() -> None:
    plain = for_gpu()
    a, b, c = (
        replace(plain, tuned=Tuned(path, "", digest))
        for path, digest in (("/x/a", "one"), ("/y/b", "one"), ("/x/a", "two"))
    )
    assert a.ingredients({}) == b.ingredients({})
    assert len({x.ingredients({}) for x in (plain, a, c)}) == 3
    assert a.xla_flags({}).endswith("--xla_gpu_load_autotune_results_from=/x/a")


def test_tuning_is_read_for_the_device_that_it_was_measured_on(tmp_path: Path) -> None:
    measured = replace(
        Fingerprint.current(), platform="cuda", compute_capability="8.9", device_kind="NVIDIA L4"
    )
    path = tmp_path / "l4.json"
    results, topology = (base64.b64encode(x).decode() for x in (b"results", b"topology"))
    write(Tuning(measured, topology, results), path)
    cache = DirectoryStore.open(tmp_path / "cache")
    tuned = read_tuning(replace(L4, tuning=str(path)), cache)
    assert tuned is not None
    assert Path(tuned.results).read_bytes() == b"results"
    assert tuned.topology == topology
    assert read_tuning(L4, cache) is None
    with pytest.raises(BuildError, match=r"expected tuning for compute capability 9\.0 .* 8\.9"):
        read_tuning(replace(target("cuda-h100"), tuning=str(path)), cache)
    path.write_bytes(path.read_bytes().replace(results.encode(), b"!"))
    with pytest.raises(RejectError, match="expected base64"):
        read_tuning(replace(L4, tuning=str(path)), cache)
    path.write_bytes(b"{}")
    with pytest.raises(RejectError, match=r"expected an object|missing"):
        read_tuning(replace(L4, tuning=str(path)), cache)
    with pytest.raises(StoreError, match="cannot read tuning results"):
        read_tuning(replace(L4, tuning=str(tmp_path / "none")), cache)


def test_the_plugin_is_named_where_jaxlib_is_not_the_compiler() -> None:
    assert for_gpu().plugin == "jax-cuda13-pjrt 0.12.0"
    assert new(V3).plugin is None


def test_a_worker_inherits_the_environment_but_for_what_changes_its_result() -> None:
    inherited = {"PATH": "/bin", "NPROC": "3", "JAX_PLATFORMS": "tpu", "PYTHONPATH": "/ours"}
    found = new(V3).environment(inherited)
    assert found["PATH"] == "/bin"
    assert found["JAX_PLATFORMS"] == "cpu"
    assert found["PYTHONHASHSEED"] == "0"
    assert found["PYTHONPATH"] == "/ours"
    assert "NPROC" not in found
    assert "PYTHONPATH" not in for_gpu().environment(inherited), "it would bring the host's jax"


@pytest.mark.parametrize("on", [t for t in catalogue().values() if t.platform == "cuda"])
def test_a_gpu_is_described_as_xla_wants_it(on: Target) -> None:
    text = gpu_config(on)
    assert f'device_description_str: "{on.device_kind}"' in text
    major, minor = (on.compute_capability or "").split(".")
    assert f"cuda_compute_capability {{ major: {major} minor: {minor} }}" in text
    assert "None" not in text
