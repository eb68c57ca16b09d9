"""`prejit targets`: every target, and the truth about what this machine compiles for."""

import json
import platform

import pytest

from prejit.compiler.targets import installing
from prejit.compiler.targets.listing import EXACT_JAX, NO, YES, Listed, list_targets
from prejit.compiler.targets.target_table import names

if platform.machine() != "x86_64":
    pytest.skip("the catalogue's targets want an x86-64 build host", allow_module_level=True)


@pytest.fixture(autouse=True)
def no_environments(tmp_path, monkeypatch):
    monkeypatch.setenv("PREJIT_ENVIRONMENTS", str(tmp_path / "environments"))


def listed(host_jax):
    return {each.target.name: each for each in list_targets(host_jax)}


def test_what_needs_an_interpreter_or_a_download_says_so(tmp_path, monkeypatch):
    """Nothing on this machine runs a jax that it has not installed."""
    monkeypatch.setattr(installing, "_PYTHONS", {(0, 12): ((3, 97), (3, 99))})
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    found = listed(EXACT_JAX)
    assert found["cpu-host"] == Listed(found["cpu-host"].target, YES)
    assert (found["cpu-x86-64-v2"].builds, found["cpu-x86-64-v2"].note) == (YES, None)
    found = listed("0.10.2")
    assert found["cuda-h200"].builds == NO
    assert "jax 0.10.2 needs Python 3.97 or newer" in str(found["cuda-h200"].note)
    assert "`uv python install 3.97`" in str(found["cuda-h200"].note)
    assert "`uv python install 3.97`" in str(found["cpu-x86-64-v2"].note), "to be exact"


def test_the_command_lists_people_a_table_and_scripts_json_without_jax(run_python):
    done = run_python(
        "import sys\nfrom prejit.runtime.cli.commands import run\nassert run(['targets']) == 0\n"
        "assert run(['targets', '--json']) == 0\n"
        "found = {'jax', 'jax._src', 'jaxlib._jax', 'numpy', 'flax'} & set(sys.modules)\n"
        "assert not found, found"
    )
    text, _, listed = done.stdout.partition("\n{")
    assert all(f"\n{name} " in text for name in names())
    assert "Tesla T4" in text
    rows = {row["name"]: row for row in json.loads("{" + listed)["targets"]}
    assert list(rows) == list(names())
    assert rows["cuda-h200"]["compute_capability"] == "9.0"
    assert rows["cpu-host"]["packages"] == []
