"""The interpreters of a machine: which of them a version of jax runs on."""

import os
import sys

import pytest

from prejit.compiler.targets import installing
from prejit.compiler.targets.installing import find_interpreter
from prejit.runtime.errors import BuildError


def test_an_unknown_jax_is_as_its_neighbour():
    for jax, lowest, known in (
        *(("0.10.2", (3, 11), True), ("0.12.0.1", (3, 12), True)),
        *(("0.9.1", (3, 11), True), ("0.99.0", (3, 12), False), ("1.0", (3, 12), False)),
    ):
        found = installing.pythons(jax)
        assert found[0] == lowest
        assert (found[1] < (4, 0)) == known


def script(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_an_interpreter_without_venv_is_not_taken_and_uv_is_asked_last(tmp_path, monkeypatch):
    # A machine with nothing but this interpreter, which no jax runs on: 3.97 to 3.99 are wanted.
    monkeypatch.setattr(installing, "_PYTHONS", {(0, 12): ((3, 97), (3, 99))})
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    here = "{}.{}".format(*sys.version_info)
    with pytest.raises(BuildError) as caught:
        find_interpreter("0.12.0.1", "cpu-host")
    assert str(caught.value) == (
        f"target cpu-host: jax 0.12.0.1 needs Python 3.97 or newer, found only {here} "
        f"({os.path.realpath(sys.executable)})"
    )
    assert str(caught.value.hint).startswith("`uv python install 3.97`")
    script(tmp_path / "bin" / "python3.100", "exit 9")
    with pytest.raises(BuildError, match=r"needs Python 3\.97 to 3\.99, found only 3\.100 \("):
        find_interpreter("0.12.0.1", "cpu-host")
    bare = script(tmp_path / "bin" / "python3.98", "exit 3")
    with pytest.raises(BuildError) as caught:
        find_interpreter("0.12.0.1", "cpu-host")
    assert f"3.98 without venv ({bare})" in str(caught.value)
    assert "`apt install python3.98-venv`" in str(caught.value.hint)
    own = script(tmp_path / "pyenv/versions/3.97.1/bin/python", f"echo 3 97 {bare}x")
    assert find_interpreter("0.12.0.1", "cpu-host") == f"{bare}x"

    # uv is asked last, and may download nothing.
    own.unlink()
    python = script(tmp_path / "uv-python", 'test "$1" = -V && echo Python 3.98.1 || echo 3 98 $0')
    asked = 'test "$UV_PYTHON_DOWNLOADS" = never && test "$4" = ">=3.97,<3.100"'
    script(tmp_path / "bin" / "uv", f"{asked} && echo {python}")
    assert find_interpreter("0.12.0.1", "cpu-host") == str(python)
