"""Targets: their feature sets, and what this machine can build."""

from __future__ import annotations

import platform
from dataclasses import replace

import pytest

from prejit.compiler import target as target_module
from prejit.compiler.target import can_build, names, target
from prejit.runtime.errors import UsageError
from prejit.runtime.fingerprint import CPU_FEATURES, Fingerprint


def test_every_name_is_a_target() -> None:
    assert [target(name).name for name in names()] == list(names())


def test_each_level_contains_the_one_below() -> None:
    v2, v3, v4 = (set(target(f"cpu-x86-64-v{level}").cpu_features or ()) for level in (2, 3, 4))
    assert v2 < v3 < v4
    assert v4 - v3 == {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}


@pytest.mark.parametrize("name", names())
def test_features_are_ones_that_a_fingerprint_can_show(name: str) -> None:
    # One that it cannot would make every machine a mismatch.
    assert set(target(name).cpu_features or ()) <= set(CPU_FEATURES)


def test_the_host_target_has_no_limits() -> None:
    host = target("cpu-host")
    assert (host.cpu, host.cpu_features, host.xla_max_isa) == (None, None, None)
    assert host.architecture == platform.machine()
    assert can_build(host) is None


def test_an_unknown_target_is_told_with_the_nearest_and_all() -> None:
    with pytest.raises(UsageError) as caught:
        target("cpu-x86-v3")
    assert str(caught.value) == (
        "expected a target, one of cpu-host, cpu-x86-64-v2, cpu-x86-64-v3, cpu-x86-64-v4;"
        " found 'cpu-x86-v3'"
    )
    assert caught.value.hint == "did you mean 'cpu-x86-64-v3'?"


def test_another_architecture_cannot_be_built() -> None:
    other = replace(target("cpu-x86-64-v3"), architecture="s390x")
    assert can_build(other) == f"it needs a build host with s390x, this is {platform.machine()}"


@pytest.mark.parametrize("jaxlib", ["0.10.2", "0.9.0"])
def test_an_old_jaxlib_does_not_build_what_the_host_lacks(
    jaxlib: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = replace(
        target("cpu-x86-64-v2"), architecture=platform.machine(), cpu_features=("sse2", "warp")
    )
    have = replace(Fingerprint.current(), cpu_features=("sse2",))
    monkeypatch.setattr(target_module, "jaxlib_version", lambda: jaxlib)
    monkeypatch.setattr(Fingerprint, "current", lambda: have)
    assert can_build(wanted) == (
        f"it needs jaxlib 0.11 or later on this machine: {jaxlib} compiles only for what the build"
        " host has, and that lacks warp"
    )


@pytest.mark.parametrize("jaxlib", ["0.11.0", "0.12.0.1", "1.0.0", "0.11.0.dev20260101"])
def test_a_new_jaxlib_builds_what_the_host_lacks(
    jaxlib: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = replace(
        target("cpu-x86-64-v2"), architecture=platform.machine(), cpu_features=("warp",)
    )
    monkeypatch.setattr(target_module, "jaxlib_version", lambda: jaxlib)
    assert can_build(wanted) is None
