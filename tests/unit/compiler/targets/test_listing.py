"""`prejit targets`: every target, and the truth about what this machine compiles for."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from pathlib import Path

import pytest

from prejit.compiler.targets import interpreters
from prejit.compiler.targets.listing import DOWNLOAD, Listed, list_targets
from prejit.compiler.targets.target_table import names
from prejit.runtime.cli.commands import run

if platform.machine() != "x86_64":
    pytest.skip("the catalogue's targets want an x86-64 build host", allow_module_level=True)


@pytest.fixture(autouse=True)
def no_environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREJIT_ENVIRONMENTS", str(tmp_path / "environments"))


@pytest.fixture
def no_interpreters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing on this machine runs a jax that it has not installed."""
    monkeypatch.setattr(interpreters, "_PYTHONS", {(0, 12): ((3, 97), (3, 99))})
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))


@pytest.fixture
def every_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """This one runs any jax."""
    monkeypatch.setattr(interpreters, "_PYTHONS", {(0, 12): ((3, 0), (3, 99))})


def listed(host_jax: str) -> dict[str, Listed]:
    return {each.target.name: each for each in list_targets(host_jax)}


def test_the_command_lists_people_a_table_and_scripts_json(
    every_interpreter: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["targets"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n{name} " in text for name in names())
    assert "Tesla T4" in text
    assert "580.65.06" in text
    assert text.count("the first download: ") == 2, "once a platform"
    assert run(["targets", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["targets"]}
    assert list(rows) == list(names())
    assert rows["cuda-h200"]["builds"] is True
    assert rows["cuda-h200"]["how"] == DOWNLOAD
    assert rows["cuda-h200"]["compute_capability"] == "9.0"
    assert rows["cpu-host"]["packages"] == []


def test_listing_imports_no_jax(run_python: Callable[..., object]) -> None:
    run_python(
        "import sys\nfrom prejit.runtime.cli.commands import run\nassert run(['targets']) == 0\n"
        "found = {'jax', 'jax._src', 'jaxlib._jax', 'numpy', 'flax'} & set(sys.modules)\n"
        "assert not found, found"
    )
