"""Collect what a process reads: files, directories, environment variables, modules.

`sitecustomize` loads this file by its path at the start of Python, before the program. Python's audit events
report each file that Python opens. A file that a native library opens is not reported.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import sys
from _thread import get_ident
from collections.abc import Callable, ItemsView
from contextlib import suppress
from types import FrameType
from typing import Any

_OF_MACHINE = ("/proc/", "/sys/", "/dev/")
_IMPORT = "<frozen importlib."
"""The code that lists the directories of modules. What it imports is compared."""
_PACKAGES = os.path.join(os.path.dirname(os.__file__), "importlib", "")
"""The code that lists them to find installed packages."""
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_ASKS = {"stat": "kinds", "access": "kinds", "lstat": "links", "readlink": "links", "open": "files"}
"""Functions of `os` by what their answers depend on."""
_OF_PROCESS = (
    *("cpu_count", "process_cpu_count", "sched_getaffinity", "getloadavg", "uname", "getxattr"),
    *("umask", "write", "writev", "pwrite"),
)
"""Functions of `os` without audit events that a trace must not call: no run compares what they tell or do."""
_BYTECODE = re.compile(r"\.pyc(\.\d+)?$")
"""The end of the names of compiled modules, and of those that Python has not finished."""
_ITEMS = ItemsView.__iter__.__code__
_OF_VIEWS = ("collections.abc", "_collections_abc", "os")
_IN_FUNCTIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
"""Parts of a function with frames of their own; until Python 3.12 all comprehensions have one."""


class ProcessWatch:
    """The files, directories, variables and paths that a process has read, in order.

    Args:
        left_out: directories that hold nothing of the program.
        facts: `input_facts` of the runtime's hook.
    """

    def __init__(self, left_out: tuple[str, ...], facts: Any) -> None:
        self._left_out = (*_OF_MACHINE, *left_out)
        self._change = {
            "files": facts.identity_of,
            "listings": facts.listing_digest,
            "orders": facts.order_digest,
            "packages": facts.packages_digest,
            "kinds": facts.kind_of,
            "links": facts.link_of,
        }
        self._written: set[str] = set()
        self._seen: set[tuple[str, str]] = set()
        self._seen_by_trace: set[tuple[str, str]] = set()
        self._new: list[list[Any]] = []
        self._busy: set[int] = set()
        """The threads inside of this watch, whose own reads do not count."""
        self._facts = facts
        self._variable: Callable[[str], str | None] = os.environ.get
        self.effects: list[str] | None = None
        """The effects of the running trace outside of the process; None: no trace is running."""

    def begin(self) -> None:
        """Watch this process from now on."""
        sys.addaudithook(self._event)
        environ: Any = type(os.environ)
        read, names = environ.__getitem__, environ.__iter__
        at_start = os.environ
        self._variable = lambda name: read(at_start, name) if name in {*names(at_start)} else None
        of_shell = self._facts.OF_SHELL

        def getitem(variables: Any, name: Any) -> str:
            text = os.fsdecode(name) if isinstance(name, bytes) else name
            if isinstance(text, str) and text not in of_shell:
                frame = sys._getframe().f_back
                is_listed = frame is not None and frame.f_code is _ITEMS
                if not is_listed or text.startswith(self._prefix(frame)):
                    self._add("variables", text)
            return read(variables, name)

        def listing(method: Any) -> Any:
            def listed(variables: Any) -> Any:
                self._add("variables", self._prefix(sys._getframe().f_back) + self._facts.LISTED)
                return method(variables)

            return listed

        def copied(variables: Any) -> dict[str, str]:
            # Outside of traces copies are for processes that are started; they would count as every variable.
            return (
                {name: variables[name] for name in variables}
                if self.effects is not None
                else {name: read(variables, name) for name in names(variables)}
            )

        environ.__getitem__, environ.copy = getitem, copied
        environ.__iter__, environ.__len__ = listing(names), listing(environ.__len__)

        find = importlib.util.find_spec

        @functools.wraps(find)
        def find_spec(name: str, package: str | None = None) -> Any:
            found = find(name, package)
            if found is None:
                self._add("absent", importlib.util.resolve_name(name, package))
            return found

        importlib.util.find_spec = find_spec
        for name, kind in _ASKS.items():
            _patch(name, functools.partial(self._asked, kind))
        for name in filter(functools.partial(hasattr, os), _OF_PROCESS):
            _patch(name, functools.partial(self._called, f"os.{name}"))

    def _asked(self, kind: str, path: Any, flags: int = 0, *_: Any, **named: Any) -> None:
        """Note what code asks of a path without an audit event, or of one that is relative to a directory."""
        thread, directory = get_ident(), named.get("dir_fd")
        if thread in self._busy or not (
            isinstance(path, (str, bytes)) or hasattr(path, "__fspath__")
        ):
            return
        path = os.fsdecode(path)
        if directory is not None:
            path = os.path.join(self._facts.link_of(f"/proc/self/fd/{directory}") or "", path)
        if kind != "files":
            self._path(kind, path)
            # lstat says where there is a link, and of any other path what it is, or that there is none.
            is_link = self._facts.link_of(path) is not None
            self._path("links" if is_link else "kinds", path)
        elif directory is not None:
            self._busy.add(thread)
            self._opened(path, None, flags)
            self._busy.discard(thread)

    def _called(self, name: str, *_: Any, **named: Any) -> None:
        if self.effects is not None:
            self.effects.append(name)

    def _prefix(self, frame: FrameType | None) -> str:
        """Return the prefix of the variables that count for code that lists all."""
        while frame is not None and (
            frame.f_globals.get("__name__") in _OF_VIEWS or frame.f_code.co_name in _IN_FUNCTIONS
        ):
            frame = frame.f_back
        if frame is None:
            return ""
        prefix: str = self._facts.PREFIXES.get(frame.f_globals.get("__name__", ""), "")
        return prefix if frame.f_locals.get("prefix", prefix) == prefix else ""

    def taken(self) -> list[list[Any]]:
        """Return what is new since the last call of this: a kind, a name, and what tells of a change."""
        found = [*self._new]  # no lock, which a fork would inherit: threads only append meanwhile
        del self._new[: len(found)]
        self._seen_by_trace.clear()  # the next trace may find another content, where this one read, too
        for entry in [*found]:
            if entry[0] == "absent" and entry[1] in sys.modules:
                found.remove(entry)
            if entry[0] == "variables":
                name: str = entry[1]
                is_listed = name.endswith(self._facts.LISTED)
                entry[2] = (
                    self._facts.counted_names(name[:-1]) if is_listed else self._variable(name)
                )
        return found

    def _add(self, kind: str, name: str) -> None:
        seen = self._seen if self.effects is None else self._seen_by_trace
        if (kind, name) not in seen:
            read = self._change.get(kind)
            self._new.append([kind, name, None if read is None else read(name)])
            self._seen.add((kind, name))
            seen.add((kind, name))

    def _event(self, event: str, arguments: tuple[Any, ...]) -> None:
        thread = get_ident()
        if thread in self._busy:
            return
        self._busy.add(thread)
        try:
            self._read(event, arguments)
        finally:
            self._busy.discard(thread)

    def _read(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            self._opened(*arguments)
        elif event in ("os.listdir", "os.scandir"):
            path = arguments[0]
            code = sys._getframe(2).f_code.co_filename
            if isinstance(path, (str, bytes, type(None))) and not code.startswith(_IMPORT):
                # What a trace makes may have the order; of a list made before, its signature has it.
                names = "listings" if self.effects is None else "orders"
                kind = "packages" if code.startswith(_PACKAGES) else names
                self._path(kind, os.fsdecode(path or "."))
        elif event in ("import", "ctypes.dlopen"):
            path = arguments[1 if event == "import" else 0]
            if isinstance(path, str) and os.path.sep in path:
                self._path("files", path)
            elif event == "import" and self.effects is not None:
                self._add("absent", arguments[0])
        elif event == "sqlite3.connect":
            path = os.fsdecode(arguments[0])
            if path.startswith("file:"):
                from urllib.parse import unquote

                path = unquote(path.removeprefix("file:").partition("?")[0])
            if path != ":memory:":
                self._path("files", path)
                self._path("files", f"{path}-wal")  # what was written last
        elif event == "mmap.__new__" and self.effects is not None:  # shm_open has no event
            path = self._facts.link_of(f"/proc/self/fd/{arguments[0]}") or ""
            if os.path.isabs(path):
                self._path("files", path)
        elif event == "os.mkdir" and arguments[2] == -1 and not os.path.lexists(arguments[0]):
            self._written.add(os.path.abspath(os.fsdecode(arguments[0])))
        if event in _EFFECTS and self.effects is not None and not _keeps_bytecode(event, arguments):
            self.effects.append(event)

    def _opened(self, path: Any, mode: Any, flags: Any) -> None:
        if not isinstance(path, (str, bytes)) or not path:
            return
        path = os.fsdecode(path)
        writes = any(each in mode for each in "wax+") if mode else bool(flags and flags & _WRITES)
        if not writes:
            self._path("files", path)
            return
        path = os.path.abspath(path)
        if os.path.lexists(path) and path not in self._written and not _truncates(mode, flags):
            if "+" in (mode or "") or bool(flags and flags & os.O_RDWR):
                self._path("files", path)
        else:
            self._written.add(path)
        if (
            self.effects is not None
            and not path.startswith(self._left_out)
            and not _BYTECODE.search(path)
        ):
            self.effects.append(f"open {path} for writing")

    def _path(self, kind: str, path: str) -> None:
        if os.path.pardir in path.split(os.path.sep):  # behind a link it leads elsewhere
            path = os.path.join(os.getcwd(), path)
        else:
            path = os.path.abspath(path)
        if path.endswith(".pyc"):
            with suppress(ValueError):  # of one without a source
                path = importlib.util.source_from_cache(path)
        whole = os.path.join(path, "")
        of_machine = whole.startswith(self._left_out) and not whole.startswith(
            self._facts.FILES_OF_MEMORY
        )
        if path not in self._written and not of_machine:
            self._add(kind, path)


def _patch(name: str, note: Callable[..., None]) -> None:
    """Call `note` with the arguments of each call of a function of `os`."""
    plain = getattr(os, name)

    @functools.wraps(plain)
    def noted(*arguments: Any, **named: Any) -> Any:
        note(*arguments, **named)
        return plain(*arguments, **named)

    setattr(os, name, noted)
    for supporting in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
        if plain in supporting:
            supporting.add(noted)


def _truncates(mode: str | None, flags: int | None) -> bool:
    """Return whether a file that is opened for writing loses its content."""
    return any(each in mode for each in "wx") if mode else bool(flags and flags & os.O_TRUNC)


def _keeps_bytecode(event: str, arguments: tuple[Any, ...]) -> bool:
    """Return whether Python keeps a module that it has compiled, at its first import."""
    if event == "os.mkdir":
        return os.path.basename(os.fsdecode(arguments[0])) == "__pycache__"
    return event == "os.rename" and all(
        _BYTECODE.search(os.fsdecode(each)) for each in arguments[:2]
    )


_EFFECTS = frozenset(
    {
        *(
            "os.remove",
            "os.rename",
            "os.mkdir",
            "os.rmdir",
            "os.system",
            "os.putenv",
            "os.unsetenv",
        ),
        *("os.fork", "os.posix_spawn", "subprocess.Popen", "socket.connect", "socket.sendto"),
        "socket.gethostname",
        *("os.link", "os.symlink", "os.truncate", "shutil.rmtree"),
        *("os.chdir", "os.chmod", "os.utime"),
    }
)
"""Audit events of code that does something outside of its process."""


def start(left_out: list[str], facts: Any) -> None:
    """Watch this process. The arguments are those of ProcessWatch."""
    global watch
    directories = tuple(os.path.join(os.path.abspath(each), "") for each in left_out)
    watch = ProcessWatch(directories, facts)
    watch.begin()


watch: ProcessWatch | None = None
"""The watch of this process; None: it was not started."""
