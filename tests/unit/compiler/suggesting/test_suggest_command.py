"""`prejit suggest`: what it prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prejit.compiler.manifest.reading import read_manifest
from prejit.runtime.cli.commands import run
from prejit.runtime.errors import UsageError

MANIFEST = """
[bundle]
name = "chat"
[model]
source = "model"
[generate]
batch = [1]
prompt = [16, 64]
context = [64, 128]
[[target]]
name = "cpu-host"
[[target]]
name = "cpu-x86-64-v3"
"""


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.csv"
    path.write_text("prompt_tokens,new_tokens\n" + "21,5\n" * 9 + "60,60\n")
    return path


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    path = tmp_path / "chat.toml"
    path.write_text(MANIFEST)
    (tmp_path / "model").mkdir()
    return path


def test_the_suggested_lines_can_be_pasted_into_the_manifest(
    lengths: Path, manifest: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["suggest", str(lengths), "--manifest", str(manifest)]) == 0
    printed = capsys.readouterr().out
    pasted = printed[printed.index("[generate]") :]
    before, _, rest = MANIFEST.partition("[generate]")
    manifest.write_text(before + pasted + rest[rest.index("[[target]]") :])
    sizes = read_manifest(manifest).generate
    assert (sizes.batch, sizes.prompt, sizes.context) == ((1,), (24, 64), (32, 128))
    assert "the batches are those of today" in printed


def test_compile_times_come_from_a_report_and_count_every_target(
    lengths: Path, manifest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.json"
    rows = [{"kind": "decode", "compile_seconds": 2}, {"kind": "prefill", "compile_seconds": 4}]
    report.write_text(json.dumps({"programs": rows}))
    arguments = ["--manifest", str(manifest), "--build-report", str(report), "--json"]
    assert run(["suggest", str(lengths), *arguments]) == 0
    today = json.loads(capsys.readouterr().out)["today"]
    # 2 decode, 4 prefill, 3 copies, whose kind the report lacks: the mean.
    assert today["programs"] == 9
    assert today["compile_seconds"] == 2 * (2 * 2 + 4 * 4 + 3 * 3)
    report.write_text("[]")
    with pytest.raises(UsageError, match="expected the report of a build"):
        run(["suggest", str(lengths), *arguments])
