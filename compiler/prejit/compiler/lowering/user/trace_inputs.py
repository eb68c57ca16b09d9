"""The inputs that tracing a user's code reads, by name, and the digest of each as it is now. No JAX.

A name is the same on every machine: modules by their import names, files by a path that is relative to the
manifest or to the home directory. So builds of one checkout share traces.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from glob import glob
from importlib import metadata
from importlib.machinery import BuiltinImporter, FrozenImporter, ModuleSpec, PathFinder
from pathlib import Path
from typing import Any, Literal, final, get_args

from prejit.compiler.base.python_source import is_in_package
from prejit.compiler.store.prejit_code import code_digest, directories
from prejit.runtime.base.files import digest_of
from prejit.runtime.errors import ManifestError
from prejit.runtime.machine.kept_files import Receipts

Kind = Literal[
    "module",
    "file",
    "existence of",
    "status of",
    "directory",
    "working directory",
    "variable",
    "version of",
    "our code in",
]

ABSENT = "absent"
INSTALLED = "installed"
"""The digest of a module of an installed package, whose version decides what it does."""
UNSET = "unset"
"""The digest of an environment variable without a value."""
OF_BUILD = "of the build"
"""The name of the working directory, to which relative paths belong."""
VARIABLES = "*"
"""In place of the name of a variable: the names of all variables, which code asked for."""
_VARYING = re.compile(
    r"(JAX|XLA|PYTHON|XDG|SSH|LC|PREJIT|CI|GITHUB|RUNNER)_\w*|_|PATH|HOME|PWD|OLDPWD|USER|LOGNAME|SHELL|SHLVL"
    r"|TERM\w*|COLUMNS|LINES|TMPDIR|TEMP|TMP|LANG\w*|DISPLAY|HOSTNAME|COLORTERM|NO_COLOR|FORCE_COLOR"
)
_HARMLESS = ("JAX_", "XLA_", "PYTHON")
"""Environment variables whose names begin with these hold settings and no secrets."""
_NAMESPACE = "namespace package"
_LARGE_BYTES = 1 << 20
"""Files from this size on are hashed once, and again only when they change."""
_OF_MACHINE = re.compile(r"\.\./|[^/]+\.dist-info/|__editable__|[^/]+\.pth,")
"""Lines of RECORD that are not of the wheel's files."""


@dataclass(frozen=True, order=True, slots=True)
class Input:
    """One thing that a trace reads.

    Attributes:
        kind: what it is.
        name: import name of a module, portable path of a file or directory, name of an environment variable
            or of a distribution.
    """

    kind: Kind
    name: str

    @property
    def is_private(self) -> bool:
        """True if its value may be a secret: others could try out all short passwords on a plain digest."""
        return self.kind == "variable" and not self.name.startswith(_HARMLESS)

    @property
    def label(self) -> str:
        """The name of the ingredient of keys that holds its digest."""
        return f"{self.kind} {self.name}"


def is_input(ingredient: str) -> bool:
    """Return whether an ingredient of a key holds the digest of an input."""
    return ingredient.startswith(tuple(f"{kind} " for kind in get_args(Kind)))


@cache
def is_installed(file: str) -> bool:
    """Return whether a source file belongs to Python, to an installed package or to prejit."""
    return is_in_package(file) or file.startswith(("<", *_library_places()))


@cache
def is_standard(file: str) -> bool:
    """Return whether a source file belongs to Python's standard library."""
    return not is_in_package(file) and file.startswith(("<", *_python_places()))


def is_ours(file: str) -> bool:
    """Return whether a source file belongs to prejit."""
    return file.startswith(_our_places())


@cache
def _our_places() -> tuple[str, ...]:
    return tuple(f"{directory}{os.sep}" for directory in directories())


@cache
def _python_places() -> tuple[str, ...]:
    python = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    return tuple(f"{place}{os.sep}" for place in sorted(python))


@cache
def _library_places() -> tuple[str, ...]:
    return (*_python_places(), *_our_places())


def portable_path(path: str, directory: str) -> str:
    """Return a path as it is on other machines: relative to the manifest's directory, or to the home.

    Both paths are absolute; `directory` is the manifest's.
    """
    home = os.path.expanduser("~")
    common = os.path.commonpath([path, directory])
    if common != os.sep and os.path.commonpath([common, home]) != common:
        return os.path.relpath(path, directory)
    if os.path.commonpath([path, home]) == home != os.sep:
        return os.path.join("~", os.path.relpath(path, home))
    return path


def local_path(path: str, directory: str) -> str:
    """Return the absolute form of a portable path."""
    return os.path.normpath(os.path.join(directory, os.path.expanduser(path)))


@final
class Present:
    """The digests of inputs as they are now. Each input is read once."""

    def __init__(
        self, directory: Path, front: Sequence[str] = (), back: Sequence[str] = ()
    ) -> None:
        """Read nothing yet.

        Args:
            directory: the manifest's directory.
            front: portable paths of the directories that come before `sys.path`; empty: the manifest's own.
            back: portable paths of the directories that the user's code puts behind `sys.path`.
        """
        self._directory = str(directory.absolute())
        self._path = [
            *(local_path(entry, self._directory) for entry in front or (".",)),
            *sys.path,
            *(local_path(entry, self._directory) for entry in back),
        ]
        self._digests: dict[Input, str] = {}
        self._specs: dict[str, ModuleSpec | None] = {}
        self.files = cache(self._files)
        importlib.invalidate_caches()  # a file may be newer than the importer's caches

    def digests(self, inputs: Iterable[Input]) -> dict[Input, str]:
        """Return the digest of each input."""
        return {each: self.digest(each) for each in inputs}

    def digest(self, wanted: Input) -> str:
        """Return the digest of an input: a text that changes when the input does."""
        if wanted not in self._digests:
            self._digests[wanted] = self._read(wanted)
        return self._digests[wanted]

    def _files(self, patterns: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
        """Return the files that patterns name by their portable paths, each with its digest, sorted.

        Args:
            patterns: paths and glob patterns, relative to the manifest; a directory stands for all below.
        """
        found = set[str]()
        for pattern in patterns:
            for name in glob(pattern, root_dir=self._directory, recursive=True):
                path = Path(self._directory, name)
                for each in files_below(path) if path.is_dir() else (path,):
                    if each.is_file():
                        found.add(os.path.abspath(each))
                    elif each.exists() and not each.is_dir():
                        raise ManifestError(
                            f"{each}: expected a regular file, because the manifest names it by {pattern!r}; "
                            "found a FIFO, a device or a socket",
                            hint="move it to another directory, or name the other files one by one",
                        )
        inputs = sorted(Input("file", portable_path(path, self._directory)) for path in found)
        return tuple((each.name, self.digest(each)) for each in inputs)

    def _read(self, wanted: Input) -> str:
        name = wanted.name
        match wanted.kind:
            case "module":
                return self._module(name)
            case "file":
                return file_digest(local_path(name, self._directory))
            case "existence of":
                return existence(local_path(name, self._directory))
            case "status of":
                return status(local_path(name, self._directory))
            case "working directory":
                return working_directory(self._directory)
            case "directory":
                return directory_digest(local_path(name, self._directory))
            case "variable":
                value = names_of_variables() if name == VARIABLES else os.environ.get(name)
                return UNSET if value is None else digest_of(os.fsencode(value))
            case "version of":
                return version_of(name)
            case "our code in":
                return code_digest(name)

    def _module(self, name: str) -> str:
        spec = self.spec(name)
        if spec is None:
            return ABSENT
        if spec.origin is None:
            return _NAMESPACE
        if not spec.has_location or is_installed(os.path.abspath(spec.origin)):
            return INSTALLED
        try:
            content = read_source(spec)
        except OSError:
            return ABSENT
        return module_digest(content, is_package=spec.submodule_search_locations is not None)

    def spec(self, name: str) -> ModuleSpec | None:
        """Return where Python would find a module. Nothing is imported, not even its package."""
        if name not in self._specs:
            package = name.rpartition(".")[0]
            places: Sequence[str] | None = self._path
            if package:
                parent = self.spec(package)
                places = None if parent is None else parent.submodule_search_locations
            self._specs[name] = None if places is None else _find(name, places, top=not package)
        return self._specs[name]


def _find(name: str, places: Sequence[str], *, top: bool) -> ModuleSpec | None:
    for finder in sys.meta_path:
        if finder is PathFinder:
            found = _find_in(name, places)
        elif finder in (BuiltinImporter, FrozenImporter):
            found = finder.find_spec(name, None) if top else None
        else:
            found = finder.find_spec(name, None if top else places)
        if found is not None:
            return found
    return None


def _find_in(name: str, places: Sequence[str]) -> ModuleSpec | None:
    """Return a module on a path. PathFinder itself needs the package of a namespace package imported."""
    portions: list[str] = []
    for place in places:
        finder: Any = pkgutil.get_importer(place or os.getcwd())
        found = None if finder is None else finder.find_spec(name)
        if found is None:
            continue
        if found.loader is not None:
            return found
        portions += found.submodule_search_locations or ()
    if not portions:
        return None
    namespace = ModuleSpec(name, None, is_package=True)
    namespace.submodule_search_locations = portions
    return namespace


def read_source(spec: ModuleSpec) -> bytes:
    """Return the source of a module that has a location. It raises OSError where the file is gone."""
    read: Any = getattr(spec.loader, "get_data", None)
    return Path(str(spec.origin)).read_bytes() if read is None else bytes(read(spec.origin))


def module_digest(content: bytes, *, is_package: bool) -> str:
    """Return the digest of a module of the user from its source."""
    return digest_of(content) + " (a package)" * is_package


def file_digest(path: str) -> str:
    """Return the digest of a file's content, or a text that says why it has none."""
    try:
        if os.path.isdir(path):
            return "a directory"
        if not os.path.isfile(path):  # reading a FIFO or a device may never end
            return "no regular file" if os.path.exists(path) else ABSENT
        if os.path.getsize(path) < _LARGE_BYTES:
            return digest_of(Path(path).read_bytes())
        # Of this file alone: saving drops what it was not asked for.
        receipts = Receipts(Path(path))
        digest = receipts.digest_of(Path(path))
        receipts.save()
        return digest
    except OSError:
        return ABSENT


def files_below(directory: Path) -> Iterator[Path]:
    """Yield what lies below a directory, but no directories. Links are followed, each place once."""
    seen = set[str]()
    for at, inner, names in os.walk(directory, followlinks=True):
        if (place := os.path.realpath(at)) in seen:
            inner.clear()
            continue
        seen.add(place)
        inner.sort()
        yield from (Path(at, name) for name in names)


def existence(path: str) -> str:
    """Return what the status of a path says: a directory, a file and its size, a link to one, or nothing."""
    link = ""
    try:
        if os.path.islink(path):
            link = f"a link to {digest_of(os.fsencode(os.readlink(path)))}, "
        if os.path.isdir(path):
            return f"{link}a directory"
        return f"{link}a file of {os.path.getsize(path)} bytes"
    except OSError:
        return f"{link}{ABSENT}"


def status(path: str) -> str:
    """Return what the status of a path says with its mode and time, and those of the link that it may be."""
    try:
        found = [f"{each.st_mode:o} {each.st_mtime_ns}" for each in (os.lstat(path), os.stat(path))]
    except OSError:
        found = []
    return ", ".join([existence(path), *found])


def working_directory(directory: str) -> str:
    """Return the portable path of the working directory."""
    try:
        return portable_path(os.getcwd(), directory)
    except OSError:  # it was deleted
        return ABSENT


def directory_digest(path: str) -> str:
    """Return the digest of the names in a directory, which tells directories and links from files.

    The order in which the system lists them counts: code may take them in it.
    """
    try:
        with os.scandir(path) as entries:
            names = [
                f"{each.name}{'/' * each.is_dir()}{'@' * each.is_symlink()}"
                for each in entries
                if each.name != "__pycache__"
            ]
    except OSError:
        return ABSENT
    return digest_of("\0".join(names).encode("utf-8", "surrogateescape"))


def varies(variable: str) -> bool:
    """Return whether an environment variable differs between machines; jax's settings are in keys."""
    return _VARYING.fullmatch(variable) is not None


def names_of_variables() -> str:
    """Return the names of the environment variables that do not differ between machines."""
    return "\n".join(sorted(name for name in os.environ if not varies(name)))


def version_of(distribution: str) -> str:
    """Return the version of a distribution, and the digest of its files as RECORD lists them.

    Lines that differ between machines with the same wheel do not count: scripts, paths of editable installs,
    and what the installer says of itself. Modules of an editable install are the user's.
    """
    try:
        found = metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        return ABSENT
    lines = (found.read_text("RECORD") or "").splitlines()
    files = sorted(line for line in lines if ",sha256=" in line and not _OF_MACHINE.match(line))
    return " ".join([found.version, *([digest_of("\n".join(files).encode())] if files else ())])
