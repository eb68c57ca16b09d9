"""Virtual environments of workers, for targets that pin a jax version or need an accelerator's plugin.

    <root>/v1/<key>/                  a virtual environment, made once
    <root>/v1/<key>/environment.json  the marker, written last: without it the environment is incomplete
    <root>/v1/<key>.lock              held by the process that makes it, and by the workers that run in it

The key is a digest of the packages that the environment needs. The interpreter is not in it, because it does
not change what XLA compiles; an environment whose interpreter has gone is made again (installing.py).
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from prejit.compiler.store.directory_store import default_root
from prejit.compiler.targets.target_classes import Target
from prejit.runtime.base.written_files import lock_file
from prejit.runtime.errors import StoreError

VERSION = "v1"
"""Rises when environments of the last version can no longer be used. 1 (2026-11-20): the first."""

MARKER = "environment.json"
"""File that makes an environment complete."""
LOCK_SUFFIX = ".lock"
"""A lock file is named like its environment, with this suffix."""

_WORKER_PACKAGES = ("blake3>=1.0", "numpy>=2.0", "zstandard>=0.23")
"""Packages of the server side, which a worker uses to compile and to measure programs."""
_BOOTSTRAP = """
import contextlib, fcntl, os, runpy, sys, types
with contextlib.suppress(OSError):  # where there can be no lock
    fcntl.flock(os.open({lock!r}, os.O_RDONLY), fcntl.LOCK_SH)
prejit = sys.modules["prejit"] = types.ModuleType("prejit")
prejit.__path__ = {roots!r}
runpy.run_module({module!r}, run_name="__main__", alter_sys=True)
"""


@dataclass(frozen=True, slots=True)
class EnvironmentSpec:
    """The packages that an environment needs.

    Attributes:
        target: name of the first target that needs it, for messages. It is no part of the key.
        jax: version of jax.
        requirements: packages, as pip takes them.
        constraints: further constraints, as lines of a pip constraints file.
    """

    target: str
    jax: str
    requirements: tuple[str, ...]
    constraints: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Hex digest of everything that decides what is installed."""
        content = {
            "architecture": platform.machine(),
            "constraints": sorted(self.constraints),
            "requirements": sorted(self.requirements),
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Environment:
    """A complete environment.

    Attributes:
        path: its directory.
        python: its interpreter.
        versions: version of each installed package, by normalized name: `jax-cuda13-pjrt`.
    """

    path: Path
    python: Path
    versions: dict[str, str] = field(hash=False)


def root() -> Path:
    """Return the directory of environments: below `$PREJIT_ENVIRONMENTS`, else in the default build cache.

    Raises:
        StoreError: there is no home directory to put them in.
    """
    chosen = os.environ.get("PREJIT_ENVIRONMENTS")
    return (Path(chosen) if chosen else default_root() / "environments").absolute() / VERSION


def spec_for(target: Target, host_jax: str) -> EnvironmentSpec | None:
    """Return the environment that compiles for a target; None: the build host's own."""
    jax = target.jax or host_jax
    if target.platform == "cpu" and jax == host_jax and not target.constraints:
        return None
    package = "jax[tpu]" if target.platform == "tpu" else "jax"  # the extra pins libtpu
    # Without NVIDIA's libraries, which are several GB: only a program that runs needs them.
    plugin = ("jax-cuda13-plugin", "jax-cuda13-pjrt") if target.platform == "cuda" else ()
    pinned = tuple(f"{name}=={jax}" for name in (package, "jaxlib", *plugin))
    ours = (
        (*_WORKER_PACKAGES, "iced-x86>=1.21", "protobuf>=6")
        if target.platform == "cpu"
        else _WORKER_PACKAGES
    )
    return EnvironmentSpec(target.name, jax, (*pinned, *ours), target.constraints)


def find(spec: EnvironmentSpec) -> Environment | None:
    """Return an environment; None: it has to be made. Starts no process and needs no network."""
    environment = read(root() / spec.key)
    if environment is not None:
        with suppress(OSError):
            # A directory that we may only read: `prejit gc` cannot collect it either.
            os.utime(environment.path / MARKER)
    return environment


def read(path: Path) -> Environment | None:
    """Return the environment in a directory; None: it is incomplete, damaged, or without its interpreter."""
    try:
        versions = json.loads((path / MARKER).read_bytes())["versions"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    python = path / "bin" / "python"
    return Environment(path, python, versions) if os.access(python, os.X_OK) else None


def remove(path: Path) -> None:
    """Delete an environment, the marker first, so that a kill leaves none that looks complete."""
    with suppress(OSError):
        (path / MARKER).unlink()
    shutil.rmtree(path, ignore_errors=True)


def worker_command(
    environment: Environment, module: str = "prejit.compiler.compile.worker"
) -> list[str]:
    """Return the command that starts a module of this prejit in an environment.

    The caller appends the module's arguments, and removes PYTHONPATH and PYTHONHOME from its environment
    variables (`-I` would also ignore PYTHONHASHSEED). The sources of prejit may lie in two directories or in
    site-packages: the module finds the package `prejit` there, and nothing else.
    """
    runtime = importlib.util.find_spec("prejit.runtime")
    assert runtime is not None
    assert runtime.origin is not None
    roots = [
        str(root)
        for root in (Path(__file__).resolve().parents[2], Path(runtime.origin).resolve().parents[1])
    ]
    code = _BOOTSTRAP.format(
        roots=list(dict.fromkeys(roots)), lock=str(lock_path(environment.path)), module=module
    )
    return [str(environment.python), "-s", "-P", "-c", code]


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[int]:
    """Hold the lock of an environment for a block, and for as long as a child process holds its descriptor.

    Raises:
        BlockingIOError: another process holds it, and `wait` is false.
        StoreError: the lock file cannot be written or locked.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = lock_file(lock_path(path), wait=wait, mode=0o666)
    except BlockingIOError:
        raise
    except OSError as error:
        raise write_error(path, error.errno, error.strerror) from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def lock_path(path: Path) -> Path:
    """Return the lock file of the environment in a directory."""
    return path.with_name(f"{path.name}{LOCK_SUFFIX}")


def write_error(path: Path, number: int | None, reason: str | None) -> StoreError:
    """Return the error for an OSError while an environment is written."""
    full = number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return StoreError(
        f"{path}: cannot write an environment: {reason}",
        hint=("free some space (`prejit gc` does), or " if full else "")
        + "give --cache DIR, PREJIT_CACHE or PREJIT_ENVIRONMENTS a directory that you can write",
    )
