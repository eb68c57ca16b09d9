"""The Python interpreters of this machine, and which of them a version of jax runs on."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress

from prejit.runtime.errors import BuildError

_PYTHONS = {
    # jax: the oldest Python, and the newest that jaxlib and zstandard both have wheels for.
    (0, 10): ((3, 11), (3, 14)),
    (0, 11): ((3, 12), (3, 14)),
    (0, 12): ((3, 12), (3, 14)),
}
_PROBE = """
import os, sys, sysconfig
assert sys.implementation.name == "cpython" and not sysconfig.get_config_var("Py_GIL_DISABLED")
try:
    import ensurepip, venv
except ImportError:
    sys.exit(3)
print(*sys.version_info[:2], os.path.realpath(sys.executable))
"""
_NO_VENV = 3
_SHOWN = 3
"""Maximum interpreters that an error lists."""

_Version = tuple[int, int]


def find_interpreter(jax: str, target: str) -> str:
    """Return the path of an interpreter that a version of jax runs on, and that can make environments.

    Raises:
        BuildError: this machine has none.
    """
    lowest, highest = pythons(jax)
    seen: dict[str, _Version] = {}
    without: list[str] = []
    for version, path in _candidates(lowest, highest):
        if path in seen:
            continue
        seen[path] = version
        if lowest <= version <= highest:
            found = _probe(path)
            if isinstance(found, str):
                return found
            if found == _NO_VENV:
                without.append(path)
    newer = any(version > highest for version in seen.values())
    needs = f"{_text(lowest)} to {_text(highest)}" if newer else f"{_text(lowest)} or newer"
    newest = sorted(seen, key=lambda path: seen[path], reverse=True)[:_SHOWN]
    listed = (
        f"{_text(seen[path])}{' without venv' if path in without else ''} ({path})"
        for path in newest
    )
    hint = f"`uv python install {_text(lowest)}`, or install it with pyenv or the system's packages"
    if without:
        hint = f"`apt install python{_text(seen[without[0]])}-venv`, or {hint}"
    raise BuildError(
        f"target {target}: jax {jax} needs Python {needs}, found only {', '.join(listed)}",
        hint=hint,
    )


def pythons(jax: str) -> tuple[_Version, _Version]:
    """Return the oldest and the newest Python that a version of jax is known to run on."""
    known = re.match(r"(\d+)\.(\d+)", jax)
    minor = (int(known[1]), int(known[2])) if known else max(_PYTHONS)
    if minor > max(_PYTHONS):
        return _PYTHONS[max(_PYTHONS)][0], (4, 0)
    return _PYTHONS[max(minor, min(_PYTHONS))]


def _candidates(lowest: _Version, highest: _Version) -> Iterator[tuple[_Version, str]]:
    """Yield the interpreters of this machine with their versions, our own first. Some come twice."""
    yield sys.version_info[:2], os.path.realpath(sys.executable)
    on_path = []
    for directory in os.get_exec_path():
        # A shim stands for an interpreter that may not be there; pyenv's own are listed below.
        if os.path.basename(directory) != "shims":
            with suppress(OSError):
                on_path += [os.path.join(directory, name) for name in os.listdir(directory)]
    yield from _newest_first(on_path, r"/python3\.(\d+)$")
    pyenv = os.environ.get("PYENV_ROOT") or os.path.expanduser("~/.pyenv")
    with suppress(OSError):
        names = os.listdir(os.path.join(pyenv, "versions"))
        installed = [os.path.join(pyenv, "versions", name, "bin", "python") for name in names]
        yield from _newest_first(installed, r"/3\.(\d+)\.[^/]+/bin/python$")
    if uv := shutil.which("uv"):
        bound = "" if highest >= (4, 0) else f",<{highest[0]}.{highest[1] + 1}"
        found = _output([uv, "python", "find", "--system", f">={_text(lowest)}{bound}"])
        if found is not None and (version := re.search(r"3\.(\d+)", _output([found, "-V"]) or "")):
            yield (3, int(version[1])), os.path.realpath(found)


def _newest_first(paths: Sequence[str], pattern: str) -> Iterator[tuple[_Version, str]]:
    found = [(int(match[1]), path) for path in paths if (match := re.search(pattern, path))]
    for minor, path in sorted(found, key=lambda item: -item[0]):
        if os.access(path, os.X_OK):
            yield (3, minor), os.path.realpath(path)


@functools.cache
def _probe(path: str) -> str | int:
    """Return the real path of an interpreter, or the exit status that says why it cannot be used."""
    if path == os.path.realpath(sys.executable):
        complete = all(map(importlib.util.find_spec, ("venv", "ensurepip")))
        return path if complete else _NO_VENV
    try:
        done = subprocess.run(
            [path, "-I", "-c", _PROBE], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return 1
    return done.returncode or done.stdout.strip().split(" ", 2)[2]


def _output(command: Sequence[str]) -> str | None:
    environ = {**os.environ, "UV_PYTHON_DOWNLOADS": "never"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=30, check=False, env=environ
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _text(version: _Version) -> str:
    return f"{version[0]}.{version[1]}"
