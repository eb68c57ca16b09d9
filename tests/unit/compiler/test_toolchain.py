"""The environment of workers, and its part of the key."""

from __future__ import annotations

from pathlib import Path

import pytest

from prejit.compiler import toolchain
from prejit.compiler.target import target
from prejit.runtime.errors import StoreError

OURS = "--xla_cpu_parallel_codegen_split_count=1"
V3 = target("cpu-x86-64-v3")


@pytest.fixture
def old_jaxlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "cross_compiles", lambda: False)


@pytest.fixture
def new_jaxlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "cross_compiles", lambda: True)


@pytest.mark.usefixtures("old_jaxlib")
def test_an_old_jaxlib_gets_the_limit_as_its_last_flag() -> None:
    users = {"XLA_FLAGS": " --xla_a=1  --xla_cpu_max_isa=AMX "}
    assert toolchain.xla_flags(V3, users) == (
        f"{OURS} --xla_a=1 --xla_cpu_max_isa=AMX --xla_cpu_max_isa=AVX2"
    )
    assert toolchain.xla_flags(target("cpu-host"), {}) == OURS


@pytest.mark.usefixtures("new_jaxlib")
def test_a_new_jaxlib_gets_no_limit() -> None:
    assert toolchain.xla_flags(V3, {}) == OURS
    assert dict(toolchain.ingredients(V3, {}))["cpu"] == "x86-64-v3"


@pytest.mark.usefixtures("old_jaxlib")
def test_the_hosts_features_are_in_the_key_where_they_get_into_the_code() -> None:
    found = dict(toolchain.ingredients(V3, {}))["cpu_features"]
    assert found == dict(toolchain.ingredients(target("cpu-host"), {}))["cpu_features"]


def test_flags_may_come_from_a_file(tmp_path: Path) -> None:
    flags = tmp_path / "flags"
    flags.write_text("--xla_a=1\n--xla_b=2\n")
    found = toolchain.xla_flags(target("cpu-host"), {"XLA_FLAGS": str(flags)})
    assert found == f"{OURS} --xla_a=1 --xla_b=2"
    with pytest.raises(StoreError, match="cannot read the file that XLA_FLAGS names"):
        toolchain.xla_flags(V3, {"XLA_FLAGS": str(tmp_path / "none")})


def test_users_flags_change_the_key_and_their_path_does_not(tmp_path: Path) -> None:
    flags = tmp_path / "flags"
    flags.write_text("--xla_a=1")
    given = toolchain.ingredients(V3, {"XLA_FLAGS": "--xla_a=1", "HOME": "/a"})
    assert given == toolchain.ingredients(V3, {"XLA_FLAGS": str(flags), "HOME": "/b"})
    assert given != toolchain.ingredients(V3, {})


def test_each_target_has_ingredients_of_its_own() -> None:
    names = ("cpu-host", "cpu-x86-64-v2", "cpu-x86-64-v3", "cpu-x86-64-v4")
    assert len({toolchain.ingredients(target(name), {}) for name in names}) == len(names)


def test_a_worker_inherits_the_environment_but_for_what_changes_its_result() -> None:
    found = toolchain.environment(V3, {"PATH": "/bin", "NPROC": "3", "JAX_PLATFORMS": "tpu"})
    assert found["PATH"] == "/bin"
    assert found["JAX_PLATFORMS"] == "cpu"
    assert found["PYTHONHASHSEED"] == "0"
    assert "NPROC" not in found
