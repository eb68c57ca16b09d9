"""The commands of the build side: what they print, and the exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.layouts import index_of

from prejit.compiler.cli.build_commands import PLAN_HAS_CHANGES
from prejit.compiler.pipeline import plan
from prejit.compiler.targets.target_classes import Target
from prejit.runtime.cli.commands import run
from prejit.runtime.errors import ManifestError, PrejitError, UsageError

MANIFEST = """
[bundle]
name = "tiny"
[[program]]
name = "p"
function = "math:floor"
args = ["float32[]"]
[[target]]
name = "cpu-host"
[[target]]
name = "cpu-x86-64-v4"
"""


@pytest.fixture
def manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def can_build(wanted: Target) -> str | None:
        return "it lacks avx512f" if wanted.name == "cpu-x86-64-v4" else None

    monkeypatch.setattr(plan, "can_build", can_build)
    path = tmp_path / "tiny.toml"
    path.write_text(MANIFEST.replace("math:floor", "jax.numpy:floor"))
    return path


def test_a_target_that_cannot_be_built_is_left_out_when_asked_and_named(
    manifest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [
        "-o",
        str(tmp_path / "out"),
        "--cache",
        str(tmp_path / "cache"),
        "--skip-unbuildable",
    ]
    assert run(["build", str(manifest), *options]) == 0
    assert f"{manifest}: left out cpu-x86-64-v4: it lacks avx512f" in capsys.readouterr().err
    index = index_of(tmp_path / "out" / "tiny")
    assert len(index["manifests"]) == 1
    # A manifest with nothing left is passed over.
    assert run(["build", str(manifest), *options, "--target", "cpu-x86-64-v4"]) == 0


def test_wrong_manifests_are_refused_before_any_build(manifest: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text(manifest.read_text())
    options = ["-o", str(tmp_path / "out"), "--cache", str(tmp_path / "cache")]
    with pytest.raises(UsageError) as caught:
        run(["build", str(manifest), str(other), *options])
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
        run(["build", str(manifest), str(other), *options])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        ("JAX_ENABLE_X64=maybe", "expected true or false"),
        ("JAX_RANDOM_SEED_OFFSET=x", "expected a number"),
        ("PREJIT_STORE=http://", "expected the URL of a bucket or a server"),
        ("PREJIT_EXECUTOR=foo", "expected local, ray://"),
    ],
)
def test_a_variable_with_a_wrong_value_is_named(
    manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, expected: str
) -> None:
    name, _, value = variable.partition("=")
    monkeypatch.setenv(name, value)
    monkeypatch.delitem(sys.modules, "jax", raising=False)  # as in a process that begins
    options = ["-o", str(tmp_path / "out"), "--cache", str(tmp_path / "cache")]
    with pytest.raises(PrejitError, match=f"{name}: .*{expected}"):
        run(["build", str(manifest), *options, "--target", "cpu-host"])


def test_a_value_that_jax_refuses_is_named(manifest: Path, tmp_path: Path) -> None:
    variable = "JAX_DEFAULT_MATMUL_PRECISION"
    done = subprocess.run(
        [sys.executable, "-m", "prejit.runtime", "build", manifest, "--cache", tmp_path / "cache"],
        cwd=tmp_path,
        env={**os.environ, variable: "maybe"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    expected = f"{variable}: expected a value that jax takes, found 'maybe'"
    assert (done.returncode, f"error[usage]: {expected}" in done.stderr) == (2, True)


def test_patterns_that_match_nothing_are_named_and_one_program_is_counted_as_one(
    manifest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = manifest.read_text().replace("args =", 'reads = ["[", "*.none"]\nargs =')
    manifest.write_text(text)
    options = ["--cache", str(tmp_path / "cache"), "--target", "cpu-host"]
    assert run(["build", str(manifest), "-o", str(tmp_path / "out"), *options]) == 0
    said = capsys.readouterr().err
    assert f"{manifest}: reads: '[' matches no file" in said
    assert f"{manifest}: reads: '*.none' matches no file" in said
    assert run(["plan", str(manifest), *options]) == 0
    assert "\n1 program: 1 cached" in capsys.readouterr().out


def test_a_plan_tells_its_limits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.toml"
    path.write_text(MANIFEST.replace('[[target]]\nname = "cpu-x86-64-v4"\n', ""))
    command = ["plan", str(path), "--cache", str(tmp_path / "cache")]
    assert run(command) == PLAN_HAS_CHANGES
    printed = capsys.readouterr().out
    assert "p        traced at build\n" in printed
    assert "1 x  first build of this program\n" in printed
    assert printed.endswith(
        "1 program: 0 cached, at most 1 to compile (1 traced at build, which shows whether a store has "
        "them)\n"
    )
    assert run([*command, "--json"]) == PLAN_HAS_CHANGES
    found = json.loads(capsys.readouterr().out)
    assert (found["to_compile"], found["traced_at_build"]) == (0, 1)
    [row] = found["programs"]
    assert (row["state"], row["cached"]) == ("traced at build", False)
