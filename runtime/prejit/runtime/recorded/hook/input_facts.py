"""Read the inputs of a process: files, directories, and the environment variables that count.

`sitecustomize` loads this file by its path at the start of Python, for the compiler's `process_watch`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import sys

LIBRARY_PREFIXES = (
    *("JAX_", "XLA_", "TF_", "LIBTPU_", "TPU_", "CUDA_", "NVIDIA_TF32_", "NCCL_", "ROCR_", "HIP_"),
    *("OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "NPY_", "PYTHON", "LD_", "LC_", "MALLOC_"),
)
"""Environment variables that libraries read behind Python's back."""
LIBRARY_NAMES = ("LANG", "TZ", "HOME")
OF_PREJIT = ("PREJIT_", "PYTHONPATH", "JAX_COMPILATION_CACHE_", "JAX_PERSISTENT_CACHE_")
"""The beginnings of variables that `prejit record` and `prejit run` set, to values that differ."""
OF_SHELL = ("_", "OLDPWD", "SHLVL")
"""Variables by which a shell says where it started a process: code that reads all reads them."""
PREFIXES = {"networkx.utils.backends": "NETWORKX_", "tqdm.utils": "TQDM_"}
"""Modules that look at all variables and read those with a prefix; tqdm's has it in a variable `prefix`."""
LISTED = "="
"""The end of a name that stands for all that begin with what is before it: code has listed them. No variable
has it in its name."""

FILES_OF_MEMORY = "/dev/shm/"  # noqa: S108, nothing is written there
"""The directory of the files by which processes share memory: they map them."""

_stat, _readlink = os.stat, os.readlink
"""As they were when this was loaded: a recording replaces them, to see the program's calls."""


def identity_of(path: str) -> list[int] | None:
    """Return size, times and inode of a file: while they stay, so does its content, except in memory.

    None: there is no file.
    """
    return identity_and_device(path)[0]


def identity_and_device(path: str) -> tuple[list[int] | None, int]:
    """Return `identity_of` and the number of the file system."""
    try:
        found = _stat(path)
    except (OSError, ValueError):
        return None, 0
    identity = [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]
    return identity, found.st_dev


def memory_devices() -> set[int]:
    """Return the numbers of the file systems in memory, but that of the root: its files are too many."""
    found = set[int]()
    with contextlib.suppress(OSError, ValueError), open("/proc/self/mountinfo") as mounts:
        for line in mounts:  # proc_pid_mountinfo(5)
            _, _, device, *_ = fields = line.split()
            if fields[fields.index("-") + 1] in ("tmpfs", "ramfs"):
                found.add(os.makedev(*map(int, device.split(":"))))
        found.discard(_stat("/").st_dev)
    return found


def kind_of(path: str) -> int:
    """Return what a path leads to, as Linux has it: a file, a directory, ...; 0: nothing."""
    try:
        return stat.S_IFMT(_stat(path).st_mode)
    except (OSError, ValueError):
        return 0


def link_of(path: str) -> str | None:
    """Return what a symbolic link says; None: it is none."""
    try:
        return _readlink(path)
    except (OSError, ValueError):
        return None


def listing_digest(path: str) -> str | None:
    """Return a digest of a directory: its names, directories and links; None: it cannot be listed."""
    names = _listed(path)
    return None if names is None else _digest_of(sorted(names))


def order_digest(path: str) -> str | None:
    """Return a digest as `listing_digest`, of the order in which the system lists the names, too."""
    names = _listed(path)
    return None if names is None else _digest_of(names)


def _listed(path: str) -> list[str] | None:
    try:
        with os.scandir(path) as found:
            return [f"{each.name}{'//' * each.is_symlink()}{'/' * each.is_dir()}" for each in found]
    except OSError:
        return None


def packages_digest(path: str) -> str | None:
    """Return a digest of the packages that are installed in a directory; None: it cannot be listed."""
    try:
        names = sorted(each for each in os.listdir(path) if each.endswith(("-info", ".egg")))
    except OSError:
        return None
    return _digest_of(names)


def _digest_of(names: list[str]) -> str:
    content = "\0".join(names).encode(errors="surrogatepass")
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def file_of(module: object) -> str | None:
    """Return the file of a module; None: it has none. Modules that load when they are used stay asleep."""
    try:
        found = object.__getattribute__(module, "__dict__").get("__file__")
    except AttributeError:
        return None
    return found if isinstance(found, str) else None


def is_of_library(name: str) -> bool:
    """Return whether an environment variable counts although no Python code reads it."""
    return not name.startswith(OF_PREJIT) and (
        name in LIBRARY_NAMES or name.startswith(LIBRARY_PREFIXES)
    )


def initial_environment() -> dict[str, str]:
    """Return the environment with which this process started.

    `sitecustomize` keeps it: gunicorn and others write their titles over the kernel's copy.
    """
    kept: dict[str, str] | None = getattr(sys.modules.get("prejit_environment"), "at_start", None)
    return dict(os.environ) if kept is None else kept


def counted_names(prefix: str) -> list[str]:
    """Return the variables of this process's start that count for code that lists those with a prefix."""
    return [
        name
        for name in sorted(initial_environment())
        if name.startswith(prefix)
        and not (name in OF_SHELL or name.startswith(OF_PREJIT) or is_of_library(name))
    ]
