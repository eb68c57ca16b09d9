"""Make an environment with the standard library's venv, and with uv or pip.

The user's own configuration of pip decides where packages come from. uv, where it is installed, links the
files of its cache. What uv cannot do, pip does. Another jax than this one may need another Python, which
`find_interpreter` finds on this machine.

uv reads none of pip's settings. `translated` gives them to uv as environment variables, which no other user
of the machine sees, unlike arguments: the URL of an index may hold a password.
"""

from __future__ import annotations

import ast
import ctypes
import functools
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from prejit.compiler.progress import Progress, Quiet
from prejit.compiler.targets import environments
from prejit.compiler.targets.environments import MARKER, Environment, EnvironmentSpec, write_error
from prejit.runtime.base.child_process import run_child
from prejit.runtime.base.written_files import write_file
from prejit.runtime.errors import BuildError, NetworkError, PrejitError, StoreError

_LINE = re.compile(r"(?P<section>[\w:-]+)\.(?P<name>[\w-]+)=(?P<value>.*)")
"""A line of `pip config list`: `global.index-url='...'`, `:env:.find-links='...'`."""
_SECTIONS = ("global", "install", ":env:")
"""The sections of pip's settings that count for `pip install`, the strongest last."""
_WITHOUT_EFFECT = frozenset(
    {
        *("cache-dir", "no-cache-dir", "break-system-packages", "disable-pip-version-check"),
        *("compile", "no-compile", "default-timeout", "debug", "exists-action", "log", "no-color"),
        *("no-input", "no-warn-script-location", "progress-bar", "quiet", "require-virtualenv"),
        *("require-venv", "root-user-action", "user", "no-user", "verbose", "timeout", "retries"),
        *("only-binary", "prefer-binary", "no-python-version-warning", "config-file"),
        *("target", "prefix", "root", "python", "use-feature", "no-build-isolation"),
    }
)
"""Settings of pip that do not change what is installed, or that prejit itself decides."""
_LISTS = {
    "extra-index-url": ("UV_EXTRA_INDEX_URL", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "trusted-host": ("UV_INSECURE_HOST", " "),
}
"""Settings with several values: uv's variable, and what separates values there."""
_OFF = ("", "0", "false", "no", "off")
_DEVIATING = ("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_PYTHON")
"""Settings that would install somewhere else."""
_LIST_INSTALLED = """
import json, re
from importlib.metadata import distributions
print(json.dumps({re.sub("[-_.]+", "-", d.name).lower(): d.version for d in distributions()}))
"""
_LAST_LINES = 6
"""Maximum lines of pip's output in an error."""
_PYTHONS = {
    # jax: the oldest Python, and the newest that jaxlib and zstandard both have wheels for.
    (0, 10): ((3, 11), (3, 14)),
    (0, 11): ((3, 12), (3, 14)),
    (0, 12): ((3, 12), (3, 14)),
}
_INTERPRETER_PROBE = """
import os, sys, sysconfig
assert sys.implementation.name == "cpython" and not sysconfig.get_config_var("Py_GIL_DISABLED")
try:
    import ensurepip, venv
except ImportError:
    sys.exit(3)
print(*sys.version_info[:2], os.path.realpath(sys.executable))
"""
_NO_VENV = 3
"""Exit status of `_INTERPRETER_PROBE` for a Python that cannot make environments."""
_MOST_INTERPRETERS = 3
"""Maximum interpreters that an error lists."""

_Version = tuple[int, int]


@dataclass(frozen=True)
class UvSettings:
    """Settings with which uv installs what pip would install.

    Attributes:
        environ: environment variables.
        options: options of `uv pip install` that have no variable.
    """

    environ: dict[str, str]
    options: tuple[str, ...]


def find_uv() -> str | None:
    """Return the path of uv: beside this interpreter, or on the path."""
    beside = os.path.dirname(sys.executable)
    return shutil.which("uv", path=os.pathsep.join((beside, *os.get_exec_path())))


def translated(listed: str, environ: Mapping[str, str]) -> UvSettings | None:
    """Return the settings with which uv installs what pip would install; None: uv has none like them.

    Variables of uv in `environ` win over settings of pip.
    """
    # pip chooses the newest version of all indexes; uv would look no further than the first that has one.
    found = {"UV_INDEX_STRATEGY": "unsafe-best-match", "UV_PYTHON_DOWNLOADS": "never"}
    found["UV_SYSTEM_CERTS"] = "1"  # as pip does
    options: tuple[str, ...] = ()
    for name, value in _settings(listed).items():
        if name in _LISTS:
            variable, separator = _LISTS[name]
            values = [_absolute(each) for each in value.split()]
            if any(separator in each for each in values):
                return None
            found[variable] = separator.join(values)
        elif name == "index-url":
            found["UV_DEFAULT_INDEX"] = value
        elif name in ("cert", "client-cert"):
            variable = "SSL_CERT_FILE" if name == "cert" else "SSL_CLIENT_CERT"
            if os.path.isdir(value):
                return None
            found[variable] = os.path.abspath(value)
        elif name == "proxy":
            proxy = value if "://" in value else f"http://{value}"
            found |= dict.fromkeys(("ALL_PROXY", "HTTP_PROXY", "HTTPS_PROXY"), proxy)
        elif name == "constraint":  # an option, because another --constraint hides uv's variable
            options += tuple(f"--constraint={_absolute(each)}" for each in value.split())
        elif name == "no-index":
            if value.lower() not in _OFF:
                options += ("--no-index",)
        elif name == "pre":
            if value.lower() not in _OFF:
                found["UV_PRERELEASE"] = "allow"
        elif name not in _WITHOUT_EFFECT:
            return None
    own = {name: value for name, value in environ.items() if name.startswith("UV_")}
    return UvSettings(found | own, options)


def install_command(uv: str, python: Path, constraints: Path, settings: UvSettings) -> list[str]:
    """Return the command to which the caller appends the packages."""
    return [
        *(uv, "pip", "install", f"--python={python}", f"--constraint={constraints}"),
        *("--only-binary=:all:", "--no-progress", "--color=never", *settings.options),
    ]


def _settings(listed: str) -> dict[str, str]:
    by_section: dict[str, dict[str, str]] = {section: {} for section in _SECTIONS}
    for line in listed.splitlines():
        if (match := _LINE.fullmatch(line.strip())) and match["section"] in by_section:
            by_section[match["section"]][match["name"]] = str(ast.literal_eval(match["value"]))
    return {
        name: value for section in _SECTIONS for name, value in by_section[section].items() if value
    }


def _absolute(value: str) -> str:
    """Return a directory's absolute path, because uv runs elsewhere; anything else as it is."""
    return os.path.abspath(value) if os.path.exists(value) else value


def make_environment(spec: EnvironmentSpec, progress: Progress | None = None) -> Environment:
    """Return an environment, and make it where it does not exist. Several processes make it once.

    Raises:
        BuildError: this machine has no fitting interpreter, or pip finds no such packages.
        NetworkError: packages cannot be fetched.
        StoreError: the disk is full, or writing is not permitted.
    """
    progress = progress or Quiet()
    if (found := environments.find(spec)) is not None:
        return found
    python = find_interpreter(spec.jax, spec.target)
    path = environments.root() / spec.key
    with ExitStack() as held:
        with progress.phase(
            f"waiting for another process, which makes the environment of {spec.target}"
        ):
            lock = held.enter_context(environments.locked(path))
        if (found := environments.find(spec)) is not None:
            return found
        packages = ", ".join(name for name in spec.requirements if "==" in name)
        progress.note(f"making an environment for {spec.target}, once: {packages}")
        with progress.phase(f"installing {packages}"):
            try:
                _install(spec, path, python, lock, progress)
            except BaseException:
                environments.remove(path)
                raise
        made = environments.read(path)
        assert made is not None
        return made


def obstacle(spec: EnvironmentSpec) -> BuildError | None:
    """Return why an environment cannot be made here; None: it exists, or only its packages are missing."""
    if environments.read(environments.root() / spec.key) is None:
        try:
            find_interpreter(spec.jax, spec.target)
        except BuildError as error:
            return error
    return None


def _install(spec: EnvironmentSpec, path: Path, python: str, lock: int, progress: Progress) -> None:
    """Make an environment. The caller holds its lock, and pip inherits it: pip outlives a killed build."""
    environments.remove(path)
    environ = {name: value for name, value in os.environ.items() if name not in _DEVIATING}
    run = partial(_run, spec, path, lock)
    try:
        run([python, "-I", "-m", "venv", "--without-pip", str(path)], environ)
        constraints = path / "constraints.txt"
        constraints.write_text("".join(f"{line}\n" for line in spec.constraints))
        inside = str(path / "bin" / "python")
        # venv would do it, and hide why it failed.
        run([inside, "-I", "-m", "ensurepip"], environ)
        if not _install_by_uv(spec, Path(inside), constraints, environ, run, progress):
            options = ["--no-user", "--no-input", "--only-binary=:all:", "--progress-bar=off"]
            options += ["--disable-pip-version-check", f"--constraint={constraints}"]
            # It takes half of the time, and workers import one file in ten.
            options += ["--no-compile"]
            run([inside, "-I", "-m", "pip", "install", *options, *spec.requirements], environ)
        versions = json.loads(run([inside, "-I", "-c", _LIST_INSTALLED], environ))
        _sync(path)
    except OSError as error:
        raise write_error(path, error.errno, error.strerror) from error
    marker = {
        "constraints": spec.constraints,
        "python": os.path.realpath(python),
        "requirements": spec.requirements,
        "versions": versions,
    }
    write_file(path / MARKER, json.dumps(marker, indent=2, sort_keys=True).encode() + b"\n")


def _install_by_uv(
    spec: EnvironmentSpec,
    python: Path,
    constraints: Path,
    environ: Mapping[str, str],
    run: Callable[..., str],
    progress: Progress,
) -> bool:
    """Install the packages by uv, and return whether it did. Why it did not is for pip to say."""
    if (uv := find_uv()) is None:
        return False
    settings = translated(run([str(python), "-I", "-m", "pip", "config", "list"], environ), environ)
    if settings is None:
        return False
    command = install_command(uv, python, constraints, settings)
    try:
        # uv also reads the settings of the project in whose directory it runs.
        run([*command, *spec.requirements], {**environ, **settings.environ}, cwd=constraints.parent)
    except (PrejitError, OSError):
        progress.note(f"uv cannot make the environment for {spec.target}: trying pip")
        return False
    return True


def _run(
    spec: EnvironmentSpec,
    path: Path,
    lock: int,
    command: Sequence[str],
    environ: Mapping[str, str],
    cwd: Path | None = None,
) -> str:
    """Run a command to its end and return what it printed. It inherits the lock."""
    code, printed, _ = run_child(
        command, env=environ, cwd=cwd, pass_fds=(lock,), stderr=subprocess.STDOUT
    )
    output = printed.decode("utf-8", "replace")
    if code:
        raise _pip_error(spec, path, output, code)
    return output


def _pip_error(spec: EnvironmentSpec, path: Path, output: str, code: int) -> PrejitError:
    """Return the error for what venv or pip printed."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    shown = [
        line
        for line in lines
        if not line.startswith(
            ("Looking in", "Collecting", "Downloading", "Using cached", "[notice]")
        )
    ]
    printed = "\n".join(f"    | {line}" for line in shown[-_LAST_LINES:])
    head = f"target {spec.target}: cannot make its environment, "
    packages = ", ".join(spec.requirements)
    full = re.search(r"\[Errno (28|122|27)\]|No space left|Disk quota exceeded", output)
    if full:
        return StoreError(
            f"{head}the disk that holds {path} is full\n{printed}",
            hint="free some space (`prejit gc` does), or give --cache DIR, PREJIT_CACHE or "
            "PREJIT_ENVIRONMENTS a directory on another disk",
        )
    unreachable = (
        r"NewConnectionError|ConnectTimeoutError|ReadTimeoutError|ProxyError|SSLError|Max retries"
        r"|Temporary failure in name resolution|Network is unreachable|Connection (refused|reset)"
    )
    if re.search(unreachable, output):
        return NetworkError(
            f"{head}pip cannot fetch {packages}\n{printed}",
            hint="pip's own settings decide where packages come from: check `pip config list` and "
            "the proxy; without a network, point PIP_FIND_LINKS to a directory of wheels",
        )
    if missing := re.search(r"No matching distribution found for (.+)", output):
        return BuildError(
            f"{head}pip finds no {missing[1]} for this machine and Python\n{printed}",
            hint="set the target's jax to a version that `pip index versions jax` lists; if it lists none, "
            "check `pip config list` and the network",
        )
    if re.search(r"ResolutionImpossible|conflicting dependencies", output):
        return BuildError(
            f"{head}{packages} and the target's constraints exclude each other\n{printed}",
            hint="change the target's constraints, or its jax",
        )
    return BuildError(f"{head}exit status {code} of venv or pip\n{printed}")


def _sync(path: Path) -> None:
    """Write all files of pip to the disk, so that a power cut cannot leave a marker without them."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        ctypes.CDLL(None).syncfs(descriptor)
    finally:
        os.close(descriptor)


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
    newest = sorted(seen, key=lambda path: seen[path], reverse=True)[:_MOST_INTERPRETERS]
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
            [path, "-I", "-c", _INTERPRETER_PROBE],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
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
