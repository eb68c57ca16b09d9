"""Environments of workers: a target may pin a jax version, or need an accelerator's plugin.

    <root>/v1/<key>/                  a virtual environment, made once
    <root>/v1/<key>/environment.json  written last: without it the rest counts as nothing
    <root>/v1/<key>.lock              held by who makes it, and by the workers that run in it

Made with the standard library's venv and with pip, so the user's own configuration of pip decides where
packages come from. The key is of what was asked for. The interpreter is not in it: what is compiled
does not depend on it, and an environment whose interpreter has gone is made again.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prejit.compiler.progress import Progress, Quiet
from prejit.compiler.store.directory import default_root
from prejit.runtime.base.files import write_file
from prejit.runtime.base.locks import lock_file
from prejit.runtime.errors import BuildError, NetworkError, PrejitError, StoreError
from prejit.runtime.machine.target import Target

VERSION = "v1"
"""Raised when an environment of the last version could not be used. 1 (2026-11-20): the first."""

MARKER = "environment.json"
LOCK_SUFFIX = ".lock"

_PYTHONS = {
    # jax: the oldest Python, and the newest that jaxlib and zstandard both have wheels for.
    (0, 10): ((3, 11), (3, 14)),
    (0, 11): ((3, 12), (3, 14)),
    (0, 12): ((3, 12), (3, 14)),
}
_OURS = ("numpy>=2.0", "zstandard>=0.23")
_DEVIATING = ("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_PYTHON")
"""Settings that would install somewhere else."""
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
_LIST = """
import json, re
from importlib.metadata import distributions
print(json.dumps({re.sub("[-_.]+", "-", d.name).lower(): d.version for d in distributions()}))
"""
_BOOTSTRAP = """
import contextlib, fcntl, os, runpy, sys, types
with contextlib.suppress(OSError):  # where there can be no lock
    fcntl.flock(os.open({lock!r}, os.O_RDONLY), fcntl.LOCK_SH)
prejit = sys.modules["prejit"] = types.ModuleType("prejit")
prejit.__path__ = {roots!r}
runpy.run_module("prejit.compiler.compile.worker", run_name="__main__", alter_sys=True)
"""
_LAST_LINES = 6
_SHOWN = 3

_Version = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What an environment has to hold.

    Attributes:
        target: the name of the target that wants it first; for messages, no part of the key.
        jax: its version.
        requirements: packages, as pip takes them.
        constraints: further limits, as lines of a pip constraints file.
    """

    target: str
    jax: str
    requirements: tuple[str, ...]
    constraints: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Hex digest of all that decides what is installed."""
        content = {
            "architecture": platform.machine(),
            "constraints": sorted(self.constraints),
            "requirements": sorted(self.requirements),
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Environment:
    """An environment that is made.

    Attributes:
        path: its directory.
        python: its interpreter.
        versions: of what is installed, by normalized name: `jax`, `jaxlib`, `jax-cuda13-pjrt`, `libtpu`.
    """

    path: Path
    python: Path
    versions: dict[str, str] = field(hash=False)


def root() -> Path:
    """Where environments are: `$PREJIT_ENVIRONMENTS`, else `environments` in the default build cache.

    Raises:
        StoreError: there is no home directory to put them in.
    """
    chosen = os.environ.get("PREJIT_ENVIRONMENTS")
    return (Path(chosen) if chosen else default_root() / "environments").absolute() / VERSION


def wanted(target: Target, host_jax: str) -> Wanted | None:
    """The environment that compiles for a target; None: the build host's own does.

    Args:
        target: what is compiled for.
        host_jax: version of the jax that is installed here.
    """
    jax = target.jax or host_jax
    if target.platform == "cpu" and jax == host_jax and not target.constraints:
        return None
    package = "jax[tpu]" if target.platform == "tpu" else "jax"  # the extra pins libtpu
    # Without NVIDIA's libraries, which are several GB: only a program that runs needs them.
    plugin = ("jax-cuda13-plugin", "jax-cuda13-pjrt") if target.platform == "cuda" else ()
    pinned = tuple(f"{name}=={jax}" for name in (package, "jaxlib", *plugin))
    ours = (*_OURS, "iced-x86>=1.21") if target.platform == "cpu" else _OURS
    return Wanted(target.name, jax, (*pinned, *ours), target.constraints)


def find(wanted: Wanted) -> Environment | None:
    """The environment where it is made already; starts no process and needs no network."""
    environment = read(root() / wanted.key)
    if environment is not None:
        with suppress(OSError):  # `prejit gc` leaves alone what is used; it cannot collect here
            os.utime(environment.path / MARKER)
    return environment


def read(path: Path) -> Environment | None:
    """The environment in a directory; None: half made, damaged, or its interpreter has gone."""
    try:
        versions = json.loads((path / MARKER).read_bytes())["versions"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    python = path / "bin" / "python"
    return Environment(path, python, versions) if os.access(python, os.X_OK) else None


def make(wanted: Wanted, progress: Progress | None = None) -> Environment:
    """Makes an environment, or gives the one that is there. Of many processes one makes it.

    Args:
        wanted: what it has to hold.
        progress: who is told.

    Raises:
        BuildError: no interpreter fits, or no such packages.
        NetworkError: packages cannot be fetched.
        StoreError: the disk is full, or writing is not permitted.
    """
    progress = progress or Quiet()
    if (found := find(wanted)) is not None:
        return found
    python = interpreter(wanted)
    path = root() / wanted.key
    with ExitStack() as held:
        with progress.phase(f"waiting for another process's environment of {wanted.target}"):
            lock = held.enter_context(locked(path))
        if (found := find(wanted)) is not None:
            return found
        packages = ", ".join(name for name in wanted.requirements if "==" in name)
        progress.note(f"making an environment for {wanted.target}, once: {packages}")
        with progress.phase(f"installing {packages}"):
            try:
                _install(wanted, path, python, lock)
            except BaseException:
                remove(path)
                raise
        made = read(path)
        assert made is not None
        return made


def remove(path: Path) -> None:
    """Deletes an environment, the marker first: a kill leaves none that looks whole."""
    with suppress(OSError):
        (path / MARKER).unlink()
    shutil.rmtree(path, ignore_errors=True)


def obstacle(wanted: Wanted) -> BuildError | None:
    """Why an environment cannot be made here; None: it is made, or packages are all that it wants."""
    if read(root() / wanted.key) is None:
        try:
            interpreter(wanted)
        except BuildError as error:
            return error
    return None


def interpreter(wanted: Wanted) -> str:
    """The interpreter to make an environment with: the first that fits of those on this machine.

    Raises:
        BuildError: none fits.
    """
    lowest, highest = pythons(wanted.jax)
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
        f"target {wanted.target}: jax {wanted.jax} needs Python {needs}, "
        f"found only {', '.join(listed)}",
        hint=hint,
    )


def pythons(jax: str) -> tuple[_Version, _Version]:
    """The oldest and the newest Python that a version of jax runs on, as far as we know."""
    known = re.match(r"(\d+)\.(\d+)", jax)
    minor = (int(known[1]), int(known[2])) if known else max(_PYTHONS)
    if minor > max(_PYTHONS):
        return _PYTHONS[max(_PYTHONS)][0], (4, 0)
    return _PYTHONS[max(minor, min(_PYTHONS))]


def worker_command(environment: Environment) -> list[str]:
    """Starts `prejit.compiler.compile.worker` in an environment, from the sources of this prejit.

    They may lie in two directories or in site-packages: only the package `prejit` is shown to the
    worker, and nothing else that is installed there. The worker's arguments are to be added, and
    PYTHONPATH and PYTHONHOME to be taken out of its variables: `-I` would also lose PYTHONHASHSEED.
    """
    runtime = importlib.util.find_spec("prejit.runtime")
    assert runtime is not None
    assert runtime.origin is not None
    roots = [
        str(root)
        for root in (Path(__file__).resolve().parents[2], Path(runtime.origin).resolve().parents[1])
    ]
    code = _BOOTSTRAP.format(
        roots=list(dict.fromkeys(roots)), lock=str(lock_path(environment.path))
    )
    return [str(environment.python), "-s", "-P", "-c", code]


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[int]:
    """Holds the lock of an environment, for as long as this process or an heir of the descriptor lives.

    Args:
        path: the environment's directory, which need not exist.
        wait: for those who hold it.

    Raises:
        BlockingIOError: it is held and wait is false.
        StoreError: it cannot be made or locked.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = lock_file(lock_path(path), wait=wait, mode=0o666)
    except BlockingIOError:
        raise
    except OSError as error:
        raise _store_error(path, error.errno, error.strerror) from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def lock_path(path: Path) -> Path:
    """The lock of the environment in a directory."""
    return path.with_name(f"{path.name}{LOCK_SUFFIX}")


def _install(wanted: Wanted, path: Path, python: str, lock: int) -> None:
    """Makes it; the caller holds the lock. pip holds it too: should we be killed, it goes on alone."""
    remove(path)
    environ = {name: value for name, value in os.environ.items() if name not in _DEVIATING}

    def run(command: Sequence[str]) -> str:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environ,
            pass_fds=(lock,),
            start_new_session=True,  # Ctrl-C is ours to handle; and a group can be killed whole
            encoding="utf-8",
            errors="replace",
        )
        try:
            output, _ = process.communicate()
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        if process.returncode:
            raise _pip_error(wanted, path, output, process.returncode)
        return output

    try:
        run([python, "-I", "-m", "venv", "--without-pip", str(path)])
        constraints = path / "constraints.txt"
        constraints.write_text("".join(f"{line}\n" for line in wanted.constraints))
        inside = str(path / "bin" / "python")
        run([inside, "-I", "-m", "ensurepip"])  # venv would do it, and not say why it failed
        options = ["--no-user", "--no-input", "--only-binary=:all:", "--progress-bar=off"]
        options += ["--disable-pip-version-check", f"--constraint={constraints}"]
        run([inside, "-I", "-m", "pip", "install", *options, *wanted.requirements])
        versions = json.loads(run([inside, "-I", "-c", _LIST]))
        _sync(path)
    except OSError as error:
        raise _store_error(path, error.errno, error.strerror) from error
    marker = {
        "constraints": wanted.constraints,
        "python": os.path.realpath(python),
        "requirements": wanted.requirements,
        "versions": versions,
    }
    write_file(path / MARKER, json.dumps(marker, indent=2, sort_keys=True).encode() + b"\n")


def _pip_error(wanted: Wanted, path: Path, output: str, code: int) -> PrejitError:
    """What went wrong, from what venv or pip printed."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    told = [
        line
        for line in lines
        if not line.startswith(
            ("Looking in", "Collecting", "Downloading", "Using cached", "[notice]")
        )
    ]
    said = "\n".join(f"    | {line}" for line in told[-_LAST_LINES:])
    head = f"target {wanted.target}: cannot make its environment, "
    packages = ", ".join(wanted.requirements)
    full = re.search(r"\[Errno (28|122|27)\]|No space left|Disk quota exceeded", output)
    if full:
        return StoreError(
            f"{head}the disk of {path} is full\n{said}",
            hint="free some space (`prejit gc` does), or give --cache DIR, PREJIT_CACHE or "
            "PREJIT_ENVIRONMENTS a directory on another disk",
        )
    unreachable = (
        r"NewConnectionError|ConnectTimeoutError|ReadTimeoutError|ProxyError|SSLError|Max retries"
        r"|Temporary failure in name resolution|Network is unreachable|Connection (refused|reset)"
    )
    if re.search(unreachable, output):
        return NetworkError(
            f"{head}pip cannot fetch {packages}\n{said}",
            hint="pip's own settings decide where packages come from: check `pip config list` and "
            "the proxy; without a network, point PIP_FIND_LINKS to a directory of wheels",
        )
    if missing := re.search(r"No matching distribution found for (.+)", output):
        return BuildError(
            f"{head}pip finds no {missing[1]} for this machine and Python\n{said}",
            hint="`pip index versions jax` lists what there is: set the target's jax to one of them; if "
            "that finds nothing either, check `pip config list` and the network",
        )
    if re.search(r"ResolutionImpossible|conflicting dependencies", output):
        return BuildError(
            f"{head}{packages} and the target's constraints exclude each other\n{said}",
            hint="change the target's constraints, or its jax",
        )
    return BuildError(f"{head}exit status {code} of venv or pip\n{said}")


def _candidates(lowest: _Version, highest: _Version) -> Iterator[tuple[_Version, str]]:
    """Interpreters of this machine, the likeliest first, each with its version; few exist twice."""
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
    """The interpreter behind a path, or the exit status that says why it does not serve."""
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


def _sync(path: Path) -> None:
    """Makes all that pip wrote last through a power cut, before the marker says that it is there."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        ctypes.CDLL(None).syncfs(descriptor)
    finally:
        os.close(descriptor)


def _store_error(path: Path, number: int | None, reason: Any) -> StoreError:
    full = number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return StoreError(
        f"{path}: cannot write an environment: {reason}",
        hint=("free some space (`prejit gc` does), or " if full else "")
        + "give --cache DIR, PREJIT_CACHE or PREJIT_ENVIRONMENTS a directory that you can write",
    )


def _text(version: _Version) -> str:
    return f"{version[0]}.{version[1]}"
