"""Hooks that tell an `Observer` what the code of a user does.

Modules: `builtins.__import__`, `importlib.import_module` and the loader of source files are replaced while
code of the user runs, so that computed names count too. Files, directories, processes and connections: audit
events of Python, and the calls of `_READERS`, whose native code raises none. Environment variables:
`os.environ`. Whether there is a module: `importlib.util`; versions: `importlib.metadata`. The hooks see all
threads of the process, because user code reads in threads too.
"""

from __future__ import annotations

import _posixsubprocess
import builtins
import importlib.util
import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, wraps
from importlib import metadata
from importlib.machinery import SourceFileLoader
from importlib.util import resolve_name
from operator import attrgetter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, final
from urllib.parse import unquote, urlsplit
from weakref import WeakKeyDictionary

from prejit.compiler.lowering.user.observer import Observer, canonical, sees_status
from prejit.compiler.lowering.user.trace_inputs import OF_BUILD, VARIABLES, is_installed

_BOOTSTRAP: Any = importlib._bootstrap
_UTIL: Any = importlib.util
_STATUSES = ("stat", "lstat", "fstat", "access", "readlink")
_FORKS = ("os.fork", "os.forkpty")
_PROCESSES = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "pty.spawn")
_CONNECTIONS = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname")

_observer: Observer | None = None
_started: WeakKeyDictionary[threading.Thread, Observer] = WeakKeyDictionary()
"""The threads that code of the user started: they may read after the block in which they began."""
_local = threading.local()


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Observe the code that runs in the block, in all threads."""
    global _observer
    _install_audit_hook()
    _observe_variables()
    importing, finding = builtins.__import__, _BOOTSTRAP._gcd_import
    get_code, fork = SourceFileLoader.get_code, _posixsubprocess.fork_exec
    start, search = threading.Thread.start, _UTIL._find_spec
    of_system = {name: getattr(os, name) for name in (*_STATUSES, "open")}
    working = {name: getattr(os, name) for name in ("getcwd", "getcwdb")}
    temporary = tempfile.gettempdir
    from_name = vars(metadata.Distribution)["from_name"]

    def is_on() -> bool:
        return _observer is not None and not _is_busy()

    def note_native(call: str, path: Any) -> None:
        for each in _watching():
            with _unobserved():
                each.note_native(call, path)

    readers = NativeReaders(note_native)

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
                with _unobserved():
                    observer.note_absent(error.name, frame)
            raise
        if is_on():
            with _unobserved():  # Path imports a module in Python 3.12
                _note_statement(observer, frame, name, globals, fromlist or (), level)
            readers.wrap()
        return found

    def find_module(name: str, package: Any = None, level: int = 0) -> Any:
        frame = sys._getframe(1)
        try:
            found = finding(name, package, level)
        except ModuleNotFoundError as error:
            if error.name and is_on():
                with _unobserved():
                    observer.note_absent(error.name, frame)
            raise
        if is_on():
            with _unobserved():
                observer.note_import(found.__name__ if level else name, frame)
            readers.wrap()
        return found

    def read_code(self: SourceFileLoader, fullname: str) -> CodeType | None:
        path = self.get_filename(fullname)
        if not is_on() or is_installed(os.path.abspath(path)):
            return get_code(self, fullname)
        # Not from __pycache__, which holds only for whole seconds: the digest is of what runs.
        content = self.get_data(path)
        observer.note_source(fullname, path, content, is_package=self.is_package(fullname))
        return self.source_to_code(content, path)

    def find_spec(name: str, *args: Any) -> Any:
        if is_on():
            observer.note_asked("module", name)
        return search(name, *args)

    def find_distribution(cls: type[metadata.Distribution], name: str) -> Any:
        if is_on():
            observer.note_asked("version of", canonical(name))
        return from_name.__func__(cls, name)

    def reader(call: str) -> Callable[..., Any]:
        """Return a call of the system that notes its path."""

        @wraps(of_system[call])
        def read(path: Any, *args: Any, **options: Any) -> Any:
            directory = options.get("dir_fd")
            if is_on() and (call != "open" or directory is not None):
                with _unobserved():
                    _note_status(observer, call, path, directory)
            return of_system[call](path, *args, **options)

        return read

    def asking(call: str) -> Callable[[], Any]:
        """Return a call of the system that notes that it asks for the working directory."""

        @wraps(working[call])
        def ask() -> Any:
            if is_on():
                observer.note_asked("working directory", OF_BUILD)
            return working[call]()

        return ask

    @wraps(temporary)
    def find_temporary() -> str:  # Python keeps what it found first
        if is_on():
            for name in ("TMPDIR", "TEMP", "TMP"):
                observer.note_variable(name)
        return temporary()

    def start_process(*args: Any) -> int:  # that of multiprocessing raises no audit event
        if is_on():
            observer.note_trouble("starts a process")
        return fork(*args)

    def start_thread(self: threading.Thread) -> None:
        if is_on() and observer.is_users():
            _started[self] = observer
        start(self)

    before, _observer = _observer, observer
    builtins.__import__ = import_module
    _BOOTSTRAP._gcd_import = find_module
    SourceFileLoader.get_code = read_code  # type: ignore[method-assign, assignment]
    _UTIL._find_spec = find_spec
    metadata.Distribution.from_name = classmethod(find_distribution)  # type: ignore[method-assign, assignment]
    for name in of_system:
        setattr(os, name, reader(name))
    for name in working:
        setattr(os, name, asking(name))
    tempfile.gettempdir = find_temporary
    _posixsubprocess.fork_exec = start_process
    threading.Thread.start = start_thread  # type: ignore[method-assign]
    readers.wrap()
    try:
        yield
    finally:
        _observer = before
        readers.unwrap()
        _posixsubprocess.fork_exec = fork
        threading.Thread.start = start  # type: ignore[method-assign]
        builtins.__import__ = importing
        _BOOTSTRAP._gcd_import = finding
        SourceFileLoader.get_code = get_code  # type: ignore[method-assign]
        _UTIL._find_spec = search
        metadata.Distribution.from_name = from_name  # type: ignore[method-assign]
        for name, call in {**of_system, **working}.items():
            setattr(os, name, call)
        tempfile.gettempdir = temporary


@contextmanager
def _unobserved() -> Iterator[None]:
    """Observe nothing that this thread does in the block: what an observer itself reads."""
    before = _is_busy()
    _local.is_busy = True
    try:
        yield
    finally:
        _local.is_busy = before


def _is_busy() -> bool:
    return getattr(_local, "is_busy", False)


def _watching() -> set[Observer]:
    """Return the observers that what this thread does may concern."""
    if _is_busy() or (_observer is None and not _started):
        return set()
    return {_observer, _started.get(threading.current_thread())} - {None}  # type: ignore[return-value]


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
def _observe_variables() -> None:
    """Replace what reads environment variables from now on.

    Not per block: Python 3.13 notices only the first thousand changes of a class, and then goes on to
    call the `__getitem__` that it knows.
    """
    get, names = os._Environ.__getitem__, os._Environ.__iter__

    def read_variable(self: Any, key: Any) -> Any:
        if isinstance(key, str | bytes):
            for observer in _watching():
                observer.note_variable(os.fsdecode(key))
        return get(self, key)

    def read_names(self: Any) -> Iterator[Any]:
        for observer in _watching():
            observer.note_asked("variable", VARIABLES)
        return names(self)

    os._Environ.__getitem__ = read_variable  # type: ignore[method-assign]
    os._Environ.__iter__ = read_names  # type: ignore[method-assign]


@cache
def _install_audit_hook() -> None:
    """Listen to Python's audit events from now on. A hook cannot be taken away again."""
    handlers: dict[str, Callable[[Observer, tuple[Any, ...]], None]] = {
        "open": _note_open,
        "os.listdir": lambda observer, args: observer.note_path("directory", args[0] or "."),
        "os.scandir": _note_entries,
        "ctypes.dlopen": _note_library,
        "sqlite3.connect": _note_database,
        "mmap.__new__": _note_mapping,
        **dict.fromkeys(
            (*_FORKS, *_PROCESSES), lambda observer, _: observer.note_trouble("starts a process")
        ),
        **dict.fromkeys(
            _CONNECTIONS, lambda observer, _: observer.note_trouble("opens a connection")
        ),
    }

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if (handler := handlers.get(event)) is not None:
            for observer in _watching():
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


def _note_status(observer: Observer, call: str, path: Any, directory: int | None) -> None:
    """Note that code asked for the status of a path, or opened one in a directory that is open."""
    if directory is not None:
        try:
            path = os.path.join(os.readlink(f"/proc/self/fd/{directory}"), os.fsdecode(path))
        except OSError:
            return
    if call == "open":
        observer.note_path("file", path)
    elif sees_status():
        observer.note_path("status of", path)
    # `realpath` asks about each directory of a path: only links among them matter, and what is below.
    elif call != "lstat" or os.path.islink(path) or not os.path.isdir(path):
        observer.note_path("existence of", path)


def _note_entries(observer: Observer, args: tuple[Any, ...]) -> None:
    """Note that code lists a directory; its own code may ask the entries for their status."""
    path = args[0] or "."
    observer.note_path("directory", path)
    if not sees_status():
        return
    with suppress(OSError):
        directory = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else path
        for name in os.listdir(directory):
            observer.note_path("status of", os.path.join(directory, name))


def _note_database(observer: Observer, args: tuple[Any, ...]) -> None:
    path = args[0]
    if isinstance(path, str) and path.startswith("file:"):
        path = unquote(urlsplit(path).path)
    observer.note_path("file", path)
    if path and path != ":memory:":  # what a writer has not yet moved into the database itself
        observer.note_path("file", f"{os.fsdecode(path)}-wal")


def _note_mapping(observer: Observer, args: tuple[Any, ...]) -> None:
    """Note that code maps a file: that of shared memory is opened without an event."""
    if args[0] >= 0:
        observer.note_path("file", args[0])


def _note_library(observer: Observer, args: tuple[Any, ...]) -> None:
    if isinstance(args[0], str) and os.sep in args[0]:
        observer.note_path("file", args[0])


_READERS: Mapping[str, Sequence[str]] = {
    "safetensors": ("safe_open",),
    "safetensors.numpy": ("safe_open",),
    "safetensors.torch": ("safe_open",),
    "h5py": ("File.__init__",),
    "tokenizers": ("Tokenizer.from_file",),
    "tokenizers.models": tuple(
        f"{model}.{call}_file"
        for model in ("BPE", "WordLevel", "WordPiece")
        for call in ("from", "read")
    ),
    "pyarrow": ("memory_map", "OSFile", "input_stream"),
    "pyarrow.parquet": ("ParquetFile.__init__", "read_table"),
    "pyarrow.feather": ("read_table", "read_feather"),
    "pyarrow.csv": ("read_csv", "open_csv"),
    "pyarrow.dataset": ("dataset",),
    "tensorstore": ("open", "KvStore.open"),
    "cv2": ("imread",),
    "mujoco": (
        *("MjModel.from_xml_path", "MjModel.from_xml_string", "MjModel.from_binary_path"),
        *("MjSpec.from_file", "MjSpec.from_string"),
    ),
}
"""The functions and methods by which libraries open files, by module."""
_FILE_OF_MODEL = re.compile(rb"""\bfile\w*\s*=\s*(?:"([^"]*)|'([^']*))""")
"""The attributes of MuJoCo's XML that name meshes, textures and other models: file, fileright and others."""


def _names_files(model: str | bytes | os.PathLike[str], given: Sequence[Any], call: str) -> bool:
    """Return whether a model of MuJoCo, a path or a text, names files that are not given with it."""
    text = b""
    if call.endswith("_string"):
        text = os.fsencode(model)
    elif call != "from_binary_path":  # MuJoCo tells MJCF from URDF by the content
        with _unobserved(), suppress(OSError, ValueError):
            text = Path(os.fsdecode(model)).read_bytes()
    # It looks for the name without directories among the given files', then on the disk.
    given_names = (name for each in given if isinstance(each, Mapping) for name in each)
    held = {os.path.basename(name) for name in given_names}
    named = (first or second for first, second in _FILE_OF_MODEL.findall(text))
    return any(os.path.basename(os.fsdecode(name)) not in held for name in named)


@final
class NativeReaders:
    """Wrappers around the functions of `_READERS`, where their modules are imported."""

    def __init__(self, note: Callable[[str, Any], object]) -> None:
        """Wrap nothing yet.

        Args:
            note: called with the name of a function and the path that it opens; None: the path is not known.
        """
        self._note = note
        self._wrapped: dict[tuple[str, str], tuple[Any, str, Any]] = {}

    def wrap(self) -> None:
        """Wrap the functions of all modules that are imported by now."""
        for module in _READERS.keys() & sys.modules.keys():
            for name in _READERS[module]:
                if (module, name) not in self._wrapped:
                    self._wrap(module, name)

    def unwrap(self) -> None:
        """Put the functions back."""
        for owner, attribute, before in self._wrapped.values():
            setattr(owner, attribute, before)
        self._wrapped.clear()

    def _wrap(self, module: str, name: str) -> None:
        *inside, attribute = name.split(".")
        try:
            owner = (
                attrgetter(".".join(inside))(sys.modules[module]) if inside else sys.modules[module]
            )
            before = vars(owner)[attribute]
            call: Any = getattr(owner, attribute)
        except (AttributeError, KeyError):  # another version, or its import has not ended
            return
        label, note = f"{module}.{name.removesuffix('.__init__')}", self._note
        # Bytes are content to pyarrow, and paths to others.
        kinds = (str, os.PathLike) if module == "pyarrow" else (str, bytes, os.PathLike)

        @wraps(call)
        def read(*args: Any, **options: Any) -> Any:
            given = (*args, *options.values())
            paths = [each for each in given if isinstance(each, kinds)]
            path = next(iter(paths), None)
            is_text = attribute.endswith("_string")
            if (path is not None and not is_text) or module == "tensorstore":
                note(label, path)  # else it reads an open file
            if module == "tokenizers.models":  # of vocabulary and merges
                for each in filter(os.path.isfile, paths[1:]):
                    note(label, each)
            if module == "mujoco" and path is not None and _names_files(path, given, attribute):
                note(label, None)
            return call(*args, **options)

        setattr(owner, attribute, staticmethod(read) if isinstance(before, staticmethod) else read)
        self._wrapped[module, name] = (owner, attribute, before)
