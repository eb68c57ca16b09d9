"""The commands of the build side: what they print, and the exit status."""

import json
import sys

import pytest
from tests.layouts import index_of
from tests.manifests import functions_manifest

from prejit.compiler.cli.build_commands import PLAN_HAS_CHANGES
from prejit.compiler.pipeline import plan, target_tools
from prejit.runtime.cli.commands import run
from prejit.runtime.errors import ManifestError, PrejitError, UsageError


@pytest.fixture
def manifest(tmp_path, monkeypatch):
    def can_build(wanted):
        return "it lacks avx512f" if wanted.name == "cpu-x86-64-v4" else None

    for module in (plan, target_tools):
        monkeypatch.setattr(module, "can_build", can_build)
    keys = 'function = "jax.numpy:floor"; args = ["float32[]"]'
    targets = ("cpu-host", "cpu-x86-64-v4")
    return functions_manifest(tmp_path / "tiny.toml", {"p": keys}, targets)


@pytest.fixture
def places(tmp_path):
    return ["-o", str(tmp_path / "out"), "--cache", str(tmp_path / "cache")]


def test_a_target_that_is_left_out_when_asked_is_named(manifest, tmp_path, places, ran):
    options = [*places, "--skip-unbuildable"]
    printed = ran("build", manifest, *options).err
    assert f"{manifest}: left out cpu-x86-64-v4: it lacks avx512f" in printed
    assert len(index_of(tmp_path / "out" / "tiny")["manifests"]) == 1
    # A manifest with nothing left is passed over.
    assert run(["build", str(manifest), *options, "--target", "cpu-x86-64-v4"]) == 0


def test_wrong_manifests_build_nothing(manifest, tmp_path, places):
    other = tmp_path / "other.toml"
    other.write_text(manifest.read_text())
    with pytest.raises(UsageError) as caught:
        run(["build", str(manifest), str(other), *places])
    assert str(caught.value) == (
        f"{other}: bundle.name: expected another name than that of {manifest}, found 'tiny'; "
        "nothing was built"
    )
    assert not (tmp_path / "out").exists()
    again = manifest.parent / "." / ".." / manifest.parent.name / manifest.name
    with pytest.raises(UsageError, match="expected each manifest once, found it twice"):
        run(["build", str(manifest), str(again)])
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"--output.*found a file") as caught:
        run(["build", str(manifest), "-o", str(tmp_path / "file"), "--target", "cpu-host"])
    assert caught.value.hint
    other.write_text("[bundle]\n")
    with pytest.raises(ManifestError):
        run(["build", str(manifest), str(other), *places])
    assert not (tmp_path / "out").exists()


def test_a_variable_with_a_wrong_value_is_named(manifest, places, monkeypatch):
    monkeypatch.delitem(sys.modules, "jax", raising=False)  # as in a process that begins
    for name, value, expected in (
        ("JAX_ENABLE_X64", "maybe", "expected true or false"),
        ("JAX_RANDOM_SEED_OFFSET", "x", "expected a number"),
        ("PREJIT_STORE", "http://", "expected the URL of a bucket or a server"),
        ("PREJIT_EXECUTOR", "foo", "expected local, ray://"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            with pytest.raises(PrejitError, match=f"{name}: .*{expected}"):
                run(["build", str(manifest), *places, "--target", "cpu-host"])


def test_patterns_that_match_nothing_and_limits_of_a_plan_are_named(manifest, places, ran):
    text = manifest.read_text().replace("args =", 'reads = ["[", "*.none"]\nargs =')
    manifest.write_text(text)
    command = ["plan", str(manifest), *places[2:], "--target", "cpu-host"]
    found = json.loads(ran(*command, "--json", status=PLAN_HAS_CHANGES).out)
    assert (found["to_compile"], found["traced_at_build"]) == (0, 1)
    [row] = found["programs"]
    assert (row["state"], row["cached"]) == ("traced at build", False)
    said = ran("build", manifest, *places, "--target", "cpu-host").err
    assert f"{manifest}: reads: '[' matches no file" in said
    assert f"{manifest}: reads: '*.none' matches no file" in said
    assert "\n1 program: 1 cached" in ran(*command).out
