"""The commands of the build side: what they print, and the exit status."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.layouts import index_of

from prejit.compiler.cli.plan import PLAN_HAS_CHANGES
from prejit.compiler.manifest.schema import manifest_schema
from prejit.compiler.pipeline import plan
from prejit.runtime.cli.commands import run
from prejit.runtime.errors import ManifestError, UsageError
from prejit.runtime.machine.targets import Target

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


def test_manifests_of_one_bundle_name_are_refused_before_anything_is_built(
    manifest: Path, tmp_path: Path
) -> None:
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
    other.write_text("[bundle]\n")
    with pytest.raises(ManifestError):
        run(["build", str(manifest), str(other), *options])
    assert not (tmp_path / "out").exists()


def test_a_plan_says_what_only_a_build_can_find_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "m.toml"
    path.write_text(MANIFEST.replace('[[target]]\nname = "cpu-x86-64-v4"\n', ""))
    command = ["plan", str(path), "--cache", str(tmp_path / "cache")]
    assert run(command) == PLAN_HAS_CHANGES
    printed = capsys.readouterr().out
    assert "p        traced at build\n" in printed
    assert "1 x  first build of this program\n" in printed
    assert printed.endswith(
        "1 programs: 0 cached, at most 1 to compile (1 traced at build, which shows whether a store has "
        "them)\n"
    )
    assert run([*command, "--json"]) == PLAN_HAS_CHANGES
    found = json.loads(capsys.readouterr().out)
    assert (found["to_compile"], found["traced_at_build"]) == (0, 1)
    [row] = found["programs"]
    assert (row["state"], row["cached"]) == ("traced at build", False)


@pytest.mark.parametrize(
    ("function", "found", "hint"),
    [
        ("deploy:clasify", "'deploy' has no 'clasify'", "did you mean 'classify'?"),
        ("deplov:classify", "cannot import 'deplov'", "did you mean 'deploy'?"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "build"])
def test_a_function_that_does_not_exist_is_named_with_the_nearest(
    command: str, function: str, found: str, hint: str, tmp_path: Path
) -> None:
    path = tmp_path / "m.toml"
    text = MANIFEST.replace('[[target]]\nname = "cpu-x86-64-v4"\n', "")
    path.write_text(re.sub(r'function = ".*"', f'function = "{function}"', text))
    (tmp_path / "deploy.py").write_text("def classify(x):\n    return x + 1\n")
    options = [] if command == "plan" else ["-o", str(tmp_path / "out")]
    with pytest.raises(ManifestError, match=re.escape(found)) as raised:
        run([command, str(path), "--cache", str(tmp_path / "cache"), *options])
    assert hint in str(raised.value.hint)


def test_the_schema_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == manifest_schema()


@pytest.mark.parametrize("command", ["plan", "schema", "targets", "gc"])
def test_a_command_whose_reader_has_gone_ends_quietly(command: str, tmp_path: Path) -> None:
    path = tmp_path / "m.toml"
    path.write_text(MANIFEST)
    arguments = {"plan": [str(path), "--json"], "gc": ["--dry-run"]}.get(command, [])
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "prejit.runtime", command, *arguments],
        stdout=writer,
        stderr=subprocess.PIPE,
        env={**os.environ, "PREJIT_CACHE": str(tmp_path / "cache")},
        check=False,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")
