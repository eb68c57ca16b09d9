"""Note what the code of one manifest reads while it is imported and traced.

All of it counts for every program of the manifest: its sections share modules and the settings of the
process, so each may depend on what another one reads. What a library does while it is imported does not
count, because its version stands for it; but the variables that it names do. What a thread reads counts,
unless it has prejit's code on its stack and none of the user's.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any, Literal, final

from prejit.compiler.lowering.user.trace_inputs import (
    OF_BUILD,
    Input,
    Kind,
    file_digest,
    is_installed,
    is_ours,
    is_standard,
    module_digest,
    portable_path,
    varies,
)
from prejit.runtime.recorded.hook.input_facts import FILES_OF_MEMORY

_BOOTSTRAP_FILE = "<frozen importlib._bootstrap>"
_STATUSES = ("stat", "lstat", "access", "getmtime", "getctime", "getatime")
"""The functions of the standard library whose callers see all that the status of a path holds."""
_JAX = re.compile(
    r"[/\\](site|dist)-packages[/\\](jaxlib[/\\]|jax[/\\]_src[/\\]"
    r"(cache_key|cloud_tpu_init|clusters|compil\w*|distributed|hardware_utils|lru_cache|path|xla_bridge)\b)"
)
"""The modules of jax that read for themselves; others read for callers, as `jax.tree.map(open, names)`."""
_ALIVE = ("/proc/", "/sys/", "/dev/")
_ANYONE = "a thread"
"""In place of a module of the user: a thread without one on its stack, such as in a pool."""
_HOOKS = tuple(str(Path(__file__).with_name(name)) for name in ("observer.py", "observing.py"))
"""The code between what is observed and its observer."""

Owner = Literal["user", "ours", "installed"]


@dataclass(frozen=True)
class Seen:
    """The inputs that the code of a manifest has read.

    Attributes:
        inputs: by name.
        digests: the digests of those that were read at a known moment.
        files: the portable paths of modules' sources.
        trouble: why nothing may stand for tracing it; empty: the inputs decide the trace.
        hidden: what reads files that nobody sees; empty: nothing known. Declared `reads` stand for them.
        complete: whether all of its modules were observed. One that this process had imported before may be
            older than its file.
    """

    inputs: frozenset[Input]
    digests: Mapping[Input, str]
    files: Mapping[Input, str]
    trouble: str
    hidden: str
    complete: bool


@final
class Observer:
    """The inputs that the code of one manifest reads."""

    def __init__(self, directory: str) -> None:
        """Observe nothing yet."""
        self._directory = directory
        self._before = frozenset[str]()
        self._owners: dict[str, Owner] = {}
        self._imports = set[str]()
        self._reads = set[Input]()
        self._trouble = ""
        self._hidden = ""
        self._digests: dict[Input, str] = {}
        self._modules: dict[str, str] = {}  # by source file

    def note_loaded(self, modules: Iterable[str]) -> None:
        """Note the modules that the process has before it runs any code of the user."""
        self._before = frozenset(modules)

    def seen(self) -> Seen:
        """Return what the code has read until now."""
        inputs, complete, packages = self._reads.copy(), True, set[str]()  # a thread may still add
        for name in self._imports.copy():
            owner = self._owners.get(name)
            if owner == "ours":
                inputs.add(Input("our code in", name))
            elif owner == "installed":
                packages.add(name.partition(".")[0])
                inputs.add(Input("module", name.partition(".")[0]))  # others may shadow it
            else:
                complete = complete and name not in self._before
                inputs.add(Input("module", name))
        inputs |= {Input("version of", each) for each in _distributions(packages)}
        others = packages - {"prejit", *sys.stdlib_module_names}
        copied = sorted(each for each in others if not owners_of(each))
        trouble = self._trouble or "".join(f"no package has {each}" for each in copied[:1])
        files = {
            Input("module", module): portable_path(os.path.abspath(file), self._directory)
            for file, module in self._modules.items()
        }
        digests = {each: self._digests[each] for each in inputs & self._digests.keys()}
        return Seen(frozenset(inputs), digests, files, trouble, self._hidden, complete)

    # The hooks in `observing` call these.

    def note_import(self, name: str, frame: FrameType | None) -> None:
        """Note that a module was imported; no frame: a section names it."""
        while name:
            owner = self._owner(name)
            if self._importer(frame, direct=owner == "installed") is not None:
                self._imports.add(name)
            name = name.rpartition(".")[0]

    def note_absent(self, name: str, frame: FrameType | None) -> None:
        """Note that a module was looked for and not found."""
        if self._importer(frame, direct=True) is not None:
            self._reads.add(Input("module", name))

    def note_source(self, name: str, path: str, content: bytes, *, is_package: bool) -> None:
        """Note the content that a module of the user is made from."""
        self._modules[path] = name
        self._owners[name] = "user"
        self._imports.add(name)
        self._digests[Input("module", name)] = module_digest(content, is_package=is_package)

    def note_path(self, kind: Kind, path: Any) -> None:
        """Note that a file or directory was read, or looked for; an integer is its descriptor."""
        if self._reader() is None:
            return
        if isinstance(path, int):
            try:
                path = os.readlink(f"/proc/self/fd/{path}")
            except OSError:
                return
            if not os.path.isabs(path):  # a pipe or a socket
                return
        if not os.path.isabs(os.fsdecode(path)):
            self._reads.add(Input("working directory", OF_BUILD))
        file = os.path.abspath(os.fsdecode(path))
        if file.startswith(_ALIVE):
            file = os.path.realpath(file)  # /proc/self/fd/3/name is a file elsewhere
        if file in self._modules or is_installed(file) or file.startswith(_caches()):
            return
        if file.startswith(_ALIVE) and not file.startswith(FILES_OF_MEMORY):
            return
        if file.endswith(".pyc") and os.path.basename(os.path.dirname(file)) == "__pycache__":
            return
        found = Input(kind, portable_path(file, self._directory))
        self._reads.add(found)
        if kind == "file" and found not in self._digests:
            self._digests[found] = file_digest(file)

    def note_variable(self, name: str) -> None:
        """Note that an environment variable was read."""
        frame, asked = _caller()
        # Libraries keep settings that they find at their import: one that goes through all looks for others.
        if self._reader(imports=asked not in ("__iter__", "copy")) is None:
            return
        is_own = frame is None or self._is_users(frame.f_code.co_filename)
        # Paths below the home are the same on all machines that have the files.
        if (is_own and asked not in ("expanduser", "home")) or not varies(name):
            self._reads.add(Input("variable", name))

    def note_asked(self, kind: Kind, name: str) -> None:
        """Note that code asked for what is no file: whether there is a module, a version, a directory."""
        if self._reader() is not None:
            self._reads.add(Input(kind, name))

    def note_trouble(self, what: str) -> None:
        """Note that code did something whose result nothing stands for."""
        if (reader := self._reader()) is not None:
            self._trouble = self._trouble or f"{reader} {what}"

    def note_native(self, call: str, path: Any) -> None:
        """Note that native code reads a file; `path` is None where nobody knows which ones."""
        if path is not None and os.path.isfile(path):
            self.note_path("file", path)
        elif (reader := self._reader()) is not None:
            self._hidden = self._hidden or f"{reader} reads files by {call}"

    def is_users(self) -> bool:
        """Return whether the present code works for a module of the user."""
        return self._reader() is not None

    def _owner(self, name: str) -> Owner:
        if name not in self._owners:
            spec = getattr(sys.modules.get(name), "__spec__", None)
            places = [*(getattr(spec, "submodule_search_locations", None) or ())]
            file = str(getattr(spec, "origin", None) or next(iter(places), "<built-in>"))
            if not os.path.isabs(file):
                file = f"<{file}>"
            if is_ours(file) or name.partition(".")[0] == "prejit":
                self._owners[name] = "ours" if is_ours(file) else "installed"
            elif is_installed(file):
                self._owners[name] = "installed"
            else:
                self._owners[name] = "user"
                if os.path.isfile(file):  # it was imported before anyone observed
                    self._modules.setdefault(file, name)
        return self._owners[name]

    def _is_users(self, file: str) -> bool:
        """Return whether code is the user's: also without a source file, as in a zip file."""
        return file in self._modules or not is_installed(file)

    def _module_of(self, file: str, *, ours: bool) -> str | None:
        """Return the module of the user with a file; `ours`: prejit is on the stack between.

        Below prejit is what started the build, whose own reads count for nothing.
        """
        if ours:
            return self._modules.get(file)
        return self._modules.get(file, Path(file).stem) if self._is_users(file) else None

    def _importer(self, frame: FrameType | None, *, direct: bool) -> str | None:
        """Return the module of the user that imports; `direct`: not through a library."""
        ours = False
        while frame is not None:
            file = frame.f_code.co_filename
            if (found := self._module_of(file, ours=ours)) is not None:
                return found
            ours = ours or (file not in _HOOKS and is_ours(file))
            if direct and not is_standard(file):
                return None
            frame = frame.f_back
        return None if ours else _ANYONE

    def _reader(self, *, imports: bool = False) -> str | None:
        """Return the module of the user that the present code works for.

        Nothing counts that jax does for itself, such as to look for plugins, or, without `imports`, that a
        library does while it is imported.
        """
        frame: FrameType | None = sys._getframe(2)
        library, ours = "", False
        while frame is not None:
            file = frame.f_code.co_filename
            if (found := self._module_of(file, ours=ours)) is not None:
                return found
            if file == _BOOTSTRAP_FILE and not imports:
                return None
            if is_ours(file):
                ours = ours or file not in _HOOKS
            elif not library and not is_standard(file):
                library = file
                if _JAX.search(library):
                    return None
            frame = frame.f_back
        return None if ours else _ANYONE


def _caller() -> tuple[FrameType | None, str]:
    """Return the code that called what is observed, and the function of the standard library that it called.

    That is an empty text where it called what is observed itself.
    """
    frame: FrameType | None = sys._getframe(1)
    asked = ""
    while frame is not None and ((file := frame.f_code.co_filename) in _HOOKS or is_standard(file)):
        if file not in _HOOKS:
            asked = frame.f_code.co_name
        frame = frame.f_back
    return frame, asked


def sees_status() -> bool:
    """Return whether the code that asks for a status sees all of it, and not just a size or presence."""
    frame, asked = _caller()
    return frame is None or asked in ("", *_STATUSES)


def _caches() -> tuple[str, ...]:
    """Return the directory of jax's own cache of executables, which changes no program."""
    jax: Any = sys.modules.get("jax")
    place = None if jax is None else jax.config.jax_compilation_cache_dir
    return () if not place else (os.path.abspath(place) + os.sep,)


def canonical(distribution: str) -> str:
    """Return the name of a distribution as all installers spell it."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def owners_of(package: str) -> Sequence[str]:
    """Return the distributions that provide a package. Most have its name; looking at all takes 0.5 s."""
    with suppress(metadata.PackageNotFoundError):
        if name := metadata.distribution(package).metadata["Name"]:
            return (name,)
    return _owners_of_packages(tuple(sys.path)).get(package, ())


@cache
def _owners_of_packages(path: tuple[str, ...]) -> Mapping[str, Sequence[str]]:
    """Return the distributions that provide each package on `sys.path`."""
    del path
    found = metadata.packages_distributions()  # a damaged installation has no name
    named = {package: [each for each in names if each] for package, names in found.items()}
    return {package: names for package, names in named.items() if names}


def _distributions(packages: Iterable[str]) -> set[str]:
    """Return the distributions that provide packages, and those that these require."""
    left = [each for package in packages for each in owners_of(package)]
    found = set[str]()
    while left:
        name = canonical(left.pop())
        if name not in found and (required := _required(name)) is not None:
            found.add(name)
            left += required
    return found


def _required(distribution: str) -> tuple[str, ...] | None:
    """Return the names of the distributions that one requires; None: it is not installed."""
    try:
        lines = metadata.requires(distribution) or ()
    except metadata.PackageNotFoundError:
        return None
    return tuple(
        re.split(r"[^\w.-]", line, maxsplit=1)[0]
        for line in lines
        if not re.search(r"\bextra\b", line.partition(";")[2])
    )
