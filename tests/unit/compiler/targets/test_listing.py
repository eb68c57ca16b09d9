"""`prejit targets`: every target, and the truth about what this machine compiles for."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from pathlib import Path

import pytest

from prejit.compiler.targets import environments, interpreters
from prejit.compiler.targets.listing import DOWNLOAD, EXACT_JAX, NO, YES, Listed, list_targets
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


def test_what_needs_an_interpreter_or_a_download_says_so(no_interpreters: None) -> None:
    found = listed(EXACT_JAX)
    assert found["cpu-host"] == Listed(found["cpu-host"].target, YES)
    assert (found["cpu-x86-64-v2"].builds, found["cpu-x86-64-v2"].note) == (YES, None)
    found = listed("0.10.2")
    assert found["cuda-h200"].builds == NO
    assert "jax 0.10.2 needs Python 3.97 or newer" in str(found["cuda-h200"].note)
    assert "`uv python install 3.97`" in str(found["cuda-h200"].note)
    assert "`uv python install 3.97`" in str(found["cpu-x86-64-v2"].note), "to be exact"


def test_a_download_names_its_packages_until_it_is_there(
    every_interpreter: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    level = listed("0.10.2")["cpu-x86-64-v2"]
    assert (level.builds, level.note) == (
        YES,
        f'exact only with jax = "{EXACT_JAX}" in its [[target]]; '
        f"after a first download of jax=={EXACT_JAX}, jaxlib=={EXACT_JAX}",
    )
    found = listed("0.10.2")["cuda-h200"]
    assert found.builds == DOWNLOAD
    assert found.packages == (
        *("jax==0.10.2", "jaxlib==0.10.2"),
        *("jax-cuda13-plugin==0.10.2", "jax-cuda13-pjrt==0.10.2"),
    )
    wanted = environments.spec_for(found.target, "0.10.2")
    path = environments.root() / wanted.key
    (path / "bin").mkdir(parents=True)
    (path / "bin" / "python").symlink_to("/bin/sh")
    (path / environments.MARKER).write_text('{"versions": {}}')
    assert listed("0.10.2")["cuda-h200"] == Listed(found.target, YES)
    assert listed("0.10.2")["tpu-v5e"].builds == DOWNLOAD
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    found = listed("0.10.2")
    assert {each.builds for name, each in found.items() if name != "cpu-host"} == {NO}
    assert found["cpu-host"].builds == YES
    assert found["tpu-v5e"].note == "it needs a build host with x86_64, this is riscv64"


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
