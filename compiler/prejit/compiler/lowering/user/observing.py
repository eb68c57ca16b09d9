"""Observe what a user's code reads while it is imported and traced.

Modules: `builtins.__import__`, `importlib.import_module` and the loader of source files are replaced while
code of the user runs, so that computed names count too. Files, directories, processes and connections: audit
events of Python. Environment variables: `os.environ`. What a library does while it is imported does not
count: its version stands for it.
"""

from __future__ import annotations

import builtins
import importlib
import os
import re
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from importlib.machinery import SourceFileLoader
from importlib.util import resolve_name
from types import CodeType, FrameType
from typing import Any, Literal, final

from prejit.compiler.lowering.user.inputs import (
    Input,
    Kind,
    file_digest,
    is_installed,
    is_ours,
    is_standard,
    module_digest,
    portable_path,
)

_BOOTSTRAP: Any = importlib._bootstrap
_BOOTSTRAP_FILE = "<frozen importlib._bootstrap>"
_VARYING = re.compile(
    r"(JAX|XLA|PYTHON|XDG|SSH|LC|PREJIT|CI|GITHUB|RUNNER)_\w*|_|PATH|HOME|PWD|OLDPWD|USER|LOGNAME|SHELL|SHLVL"
    r"|TERM\w*|COLUMNS|LINES|TMPDIR|TEMP|TMP|LANG\w*|DISPLAY|HOSTNAME|COLORTERM|NO_COLOR|FORCE_COLOR"
)
"""Variables that differ between machines. Those that a library reads count for nothing; jax's are in keys."""
_MAPPINGS = ("os.py", "_collections_abc.py", "<frozen os>", "<frozen _collections_abc>")
"""The files of the code between `os.environ` and its reader."""
_JAX = re.compile(r"[/\\](site|dist)-packages[/\\](jax|jaxlib)[/\\]")
_ALIVE = ("/proc/", "/sys/", "/dev/")
_PROCESSES = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "pty.spawn")
_CONNECTIONS = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname")

Owner = Literal["user", "ours", "installed"]


@dataclass(frozen=True)
class Seen:
    """What a program reads when it is traced.

    Attributes:
        inputs: by name.
        digests: the digests of those that were read at a known moment.
        files: the portable paths of modules' sources.
        trouble: why nothing may stand for tracing it; empty: the inputs decide the trace.
        complete: whether all of its modules were observed. One that this process had imported before may be
            older than its file.
    """

    inputs: frozenset[Input]
    digests: Mapping[Input, str]
    files: Mapping[Input, str]
    trouble: str
    complete: bool


@final
class Observer:
    """What the code of one manifest reads, by the module of the user that reads it."""

    def __init__(self, directory: str) -> None:
        """Observe nothing yet.

        Args:
            directory: the manifest's directory, absolute.
        """
        self._directory = directory
        self._before = frozenset[str]()
        self._owners: dict[str, Owner] = {}
        self._imports: defaultdict[str, set[str]] = defaultdict(set)
        self._reads: defaultdict[str, set[Input]] = defaultdict(set)
        self._troubles: dict[str, str] = {}
        self._digests: dict[Input, str] = {}
        self._modules: dict[str, str] = {}  # by source file
        self._executed: defaultdict[str, set[str]] = defaultdict(set)

    def note_loaded(self, modules: Iterable[str]) -> None:
        """Note the modules that the process has before it runs any code of the user."""
        self._before = frozenset(modules)

    def note_executed(self, program: str, files: Iterable[str]) -> None:
        """Note the source files whose code a program's operations come from."""
        self._executed[program] |= {self._modules[file] for file in files if file in self._modules}

    def seen(self, program: str, functions: Iterable[str]) -> Seen:
        """Return what a program reads.

        Args:
            program: name of its section.
            functions: the objects that the section names, each as `package.module:attribute`.
        """
        found, inputs, troubles, complete = set[str](), set[Input](), list[str](), True
        left = [name.partition(":")[0] for name in functions] + sorted(self._executed[program])
        packages = set[str]()
        while left:
            name = left.pop()
            if name in found:
                continue
            found.add(name)
            owner = self._owners.get(name)
            if owner == "ours":
                inputs.add(Input("our code in", name))
            elif owner == "installed":
                packages.add(name.partition(".")[0])
            else:
                complete = complete and name not in self._before
                inputs.add(Input("module", name))
                inputs |= self._reads[name]
                left += [*self._imports[name], *filter(None, [name.rpartition(".")[0]])]
                if name in self._troubles:
                    troubles.append(self._troubles[name])
        inputs |= {Input("version of", each) for each in _distributions(packages)}
        files = {
            Input("module", module): portable_path(os.path.abspath(file), self._directory)
            for file, module in self._modules.items()
        }
        digests = {each: self._digests[each] for each in inputs & self._digests.keys()}
        return Seen(frozenset(inputs), digests, files, min(troubles, default=""), complete)

    # What the hooks below call.

    def note_import(self, name: str, frame: FrameType | None) -> None:
        """Note that a module was imported."""
        while name:
            owner = self._owner(name)
            if (reader := self._importer(frame, direct=owner == "installed")) is not None:
                self._imports[reader].add(name)
            name = name.rpartition(".")[0]

    def note_absent(self, name: str, frame: FrameType | None) -> None:
        """Note that a module was looked for and not found."""
        if (reader := self._importer(frame, direct=True)) is not None:
            self._reads[reader].add(Input("module", name))

    def note_source(self, name: str, path: str, content: bytes, *, is_package: bool) -> None:
        """Note the content that a module of the user is made from."""
        self._modules[path] = name
        self._owners[name] = "user"
        digest = module_digest(content, is_package=is_package)
        self._digests[Input("module", name)] = digest
        # A module may be loaded from a path, without an import of its name.
        if (reader := self._importer(sys._getframe(2), direct=False)) is not None:
            self._imports[reader].add(name)

    def note_path(self, kind: Kind, path: Any) -> None:
        """Note that a file or directory was read, or looked for."""
        if isinstance(path, int) or (reader := self._reader()) is None:
            return
        file = os.path.abspath(os.fsdecode(path))
        if file in self._modules or is_installed(file) or file.startswith((*_ALIVE, *_caches())):
            return
        if "__pycache__" in file:
            return
        found = Input(kind, portable_path(file, self._directory))
        self._reads[reader].add(found)
        if kind == "file" and found not in self._digests:
            self._digests[found] = file_digest(file)

    def note_variable(self, name: str) -> None:
        """Note that an environment variable was read."""
        if (reader := self._reader()) is None:
            return
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code.co_filename.endswith(_MAPPINGS):
            frame = frame.f_back
        is_own = frame is not None and frame.f_code.co_filename in self._modules
        if is_own or not _VARYING.fullmatch(name):
            self._reads[reader].add(Input("variable", name))

    def note_trouble(self, what: str) -> None:
        """Note that code did something whose result nothing stands for."""
        if (reader := self._reader()) is not None:
            self._troubles.setdefault(reader, f"{reader} {what}")

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

    def _importer(self, frame: FrameType | None, *, direct: bool) -> str | None:
        """Return the module of the user that imports; `direct`: not through a library."""
        while frame is not None:
            file = frame.f_code.co_filename
            if (found := self._modules.get(file)) is not None:
                return found
            if direct and not file.startswith("<") and not file.endswith("importlib/__init__.py"):
                return None
            frame = frame.f_back
        return None

    def _reader(self) -> str | None:
        """Return the module of the user that the present code works for.

        Nothing counts that a library does while it is imported, or that jax does for itself, such as to look
        for plugins.
        """
        frame: FrameType | None = sys._getframe(2)
        library = ""
        while frame is not None:
            file = frame.f_code.co_filename
            if (found := self._modules.get(file)) is not None:
                return found
            if file == _BOOTSTRAP_FILE:
                return None
            if not library and not is_standard(file) and not is_ours(file):
                library = file
                if _JAX.search(library):
                    return None
            frame = frame.f_back
        return None


def _caches() -> tuple[str, ...]:
    """Return the directory of jax's own cache of executables, which changes no program."""
    jax: Any = sys.modules.get("jax")
    place = None if jax is None else jax.config.jax_compilation_cache_dir
    return () if not place else (os.path.abspath(place) + os.sep,)


@cache
def _owners_of_packages(path: tuple[str, ...]) -> Mapping[str, Sequence[str]]:
    """Return the distributions that provide each package on `sys.path`."""
    del path
    return metadata.packages_distributions()


def _distributions(packages: Iterable[str]) -> set[str]:
    """Return the distributions that provide packages, and those that these require."""
    owners = _owners_of_packages(tuple(sys.path)) if packages else {}
    left = [each for package in packages for each in owners.get(package, ())]
    found = set[str]()
    while left:
        name = re.sub(r"[-_.]+", "-", left.pop()).lower()
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


_observer: Observer | None = None
_thread = 0


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Observe the code that runs in the block, in this thread."""
    global _observer, _thread
    _install_audit_hook()
    importing, finding, get = builtins.__import__, _BOOTSTRAP._gcd_import, os._Environ.__getitem__
    stat, get_code = os.stat, SourceFileLoader.get_code

    def is_on() -> bool:
        return _observer is not None and threading.get_ident() == _thread

    def import_module(
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> Any:
        frame = sys._getframe(1)
        try:
            found = importing(name, globals, locals, fromlist or (), level)
        except ModuleNotFoundError as error:
            if error.name and is_on():
                observer.note_absent(error.name, frame)
            raise
        if is_on():
            _note_statement(observer, frame, name, globals, fromlist or (), level)
        return found

    def find_module(name: str, package: Any = None, level: int = 0) -> Any:
        frame = sys._getframe(1)
        try:
            found = finding(name, package, level)
        except ModuleNotFoundError as error:
            if error.name and is_on():
                observer.note_absent(error.name, frame)
            raise
        if is_on():
            observer.note_import(found.__name__ if level else name, frame)
        return found

    def read_code(self: SourceFileLoader, fullname: str) -> CodeType | None:
        path = self.get_filename(fullname)
        if not is_on() or is_installed(os.path.abspath(path)):
            return get_code(self, fullname)
        # Not from __pycache__, which holds only for whole seconds: the digest is of what runs.
        content = self.get_data(path)
        observer.note_source(fullname, path, content, is_package=self.is_package(fullname))
        code: CodeType = self.source_to_code(content, path)
        return code

    def read_variable(self: Any, key: Any) -> Any:
        if isinstance(key, str | bytes) and is_on():
            observer.note_variable(os.fsdecode(key))
        return get(self, key)

    def read_status(path: Any, **options: Any) -> Any:
        if is_on():
            with _unobserved():
                observer.note_path("existence of", path)
        return stat(path, **options)

    before = (_observer, _thread)
    _observer, _thread = observer, threading.get_ident()
    builtins.__import__ = import_module
    _BOOTSTRAP._gcd_import = find_module
    os._Environ.__getitem__ = read_variable  # type: ignore[method-assign]
    SourceFileLoader.get_code = read_code  # type: ignore[method-assign, assignment]
    os.stat = read_status
    try:
        yield
    finally:
        _observer, _thread = before
        builtins.__import__ = importing
        _BOOTSTRAP._gcd_import = finding
        os._Environ.__getitem__ = get  # type: ignore[method-assign]
        SourceFileLoader.get_code = get_code  # type: ignore[method-assign]
        os.stat = stat


@contextmanager
def _unobserved() -> Iterator[None]:
    """Observe nothing in the block: what an observer itself reads."""
    global _observer
    observer, _observer = _observer, None
    try:
        yield
    finally:
        _observer = observer


def _note_statement(
    observer: Observer,
    frame: FrameType,
    name: str,
    names: Mapping[str, Any] | None,
    fromlist: Sequence[str],
    level: int,
) -> None:
    """Note an import statement that succeeded."""
    if level:
        package = (names or {}).get("__package__") or ""
        name = resolve_name("." * level + name, package)
    observer.note_import(name, frame)
    module = sys.modules.get(name)
    if not hasattr(module, "__path__"):
        return
    listed = [*fromlist]
    if "*" in listed:
        listed = [*getattr(module, "__all__", ())]
    for each in listed:
        if (inner := f"{name}.{each}") in sys.modules:
            observer.note_import(inner, frame)
        elif not hasattr(module, each):
            observer.note_absent(inner, frame)


@cache
def _install_audit_hook() -> None:
    """Listen to Python's audit events from now on. A hook cannot be taken away again."""
    handlers: dict[str, Callable[[Observer, tuple[Any, ...]], None]] = {
        "open": _note_open,
        "os.listdir": lambda observer, args: observer.note_path("directory", args[0] or "."),
        "os.scandir": lambda observer, args: observer.note_path("directory", args[0] or "."),
        "ctypes.dlopen": _note_library,
        "sqlite3.connect": lambda observer, args: observer.note_path("file", args[0]),
        **dict.fromkeys(_PROCESSES, lambda observer, _: observer.note_trouble("starts a process")),
        **dict.fromkeys(
            _CONNECTIONS, lambda observer, _: observer.note_trouble("opens a connection")
        ),
    }

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if (observer := _observer) is None or threading.get_ident() != _thread:
            return
        if (handler := handlers.get(event)) is not None:
            with _unobserved():
                handler(observer, args)

    sys.addaudithook(hook)


def _note_open(observer: Observer, args: tuple[Any, ...]) -> None:
    path, mode, flags = args
    writes = (
        flags & os.O_ACCMODE == os.O_WRONLY if mode is None else "r" not in mode and "+" not in mode
    )
    if isinstance(path, str | bytes | os.PathLike) and not writes:
        observer.note_path("file", path)


def _note_library(observer: Observer, args: tuple[Any, ...]) -> None:
    if isinstance(args[0], str) and os.sep in args[0]:
        observer.note_path("file", args[0])
