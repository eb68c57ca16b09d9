"""`prejit build`: what it leaves out, and that it says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prejit.compiler import cli
from prejit.compiler.build import plan
from prejit.runtime.machine.target import Target

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


def test_a_target_that_cannot_be_built_is_left_out_when_asked_and_told(
    manifest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [
        "-o",
        str(tmp_path / "out"),
        "--cache",
        str(tmp_path / "cache"),
        "--skip-unbuildable",
    ]
    assert cli.run(["build", str(manifest), *options]) == 0
    assert f"{manifest}: left out cpu-x86-64-v4: it lacks avx512f" in capsys.readouterr().err
    index = json.loads((tmp_path / "out" / "tiny" / "index.json").read_bytes())
    assert len(index["manifests"]) == 1
    # A manifest with nothing left is passed over.
    assert cli.run(["build", str(manifest), *options, "--target", "cpu-x86-64-v4"]) == 0
