"""Import the user's modules from beside their manifest, separate from those of every other manifest.

One command may build several manifests, each with a `model.py` beside it. While a manifest's code runs, its
directory is first on `sys.path` and its modules are in `sys.modules`; afterwards both are restored. So
relative imports, imports inside functions, and everything that finds a class by the name of its module work
as in a separate process. The working directory, environment variables, jax's settings, and the names of
`builtins` and `os` are separate too, because modules change them. The code cannot end prejit's process.
"""

from __future__ import annotations

import builtins
import importlib
import os
import pkgutil
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import (
    ExitStack,
    contextmanager,
    nullcontext,
    redirect_stderr,
    redirect_stdout,
    suppress,
)
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, final

from prejit.compiler.base.python_source import is_in_package
from prejit.compiler.lowering.user.nondeterminism import refusing_nondeterminism
from prejit.compiler.lowering.user.observer import Observer
from prejit.compiler.lowering.user.observing import observing
from prejit.compiler.lowering.user.trace_inputs import Present, is_installed, portable_path
from prejit.compiler.progress import Unbreakable
from prejit.runtime.base.wording import nearest
from prejit.runtime.errors import BuildError, ManifestError, PrejitError

_STDOUT, _STDERR = 1, 2
_TRACING_HINT = "call it under jax.jit with these shapes to see where it fails"
_TRAINING_HINT = (
    "the module changes its own state, as Dropout and BatchNorm do in training: call .eval() on it, or take "
    "its state as an argument and return it anew"
)


@final
class UserModules:
    """The modules beside one manifest. It is not thread-safe: Python has one table of modules."""

    def __init__(self, directory: Path | None) -> None:
        """Import nothing yet.

        Args:
            directory: the manifest's directory; None if the manifest was made in Python, and its functions
                use the modules of this process.
        """
        self._apart = directory is not None
        self._directory = str((directory or Path()).absolute())
        self._roots = {self._directory}  # directories of the user's modules
        self._path: list[str] = []  # sys.path as the user's code left it
        self._path_before: list[str] = []
        self._own: dict[str, ModuleType] = {}
        self._settings = _Settings()
        self._patches = Patches()
        self._depth = 0
        self.observer = Observer(self._directory)

    def find(self, function: str, where: str, *, impure: bool = False) -> Any:
        """Import the object that `function` of a [[program]] names.

        `function` is `module:attribute`. An `impure` module may read clocks and draw random numbers.
        `where` is the place in the manifest, for errors.

        Raises:
            ManifestError: the module or attribute does not exist, or the module raises.
            BuildError: the module reads a clock or draws random numbers without a seed.
        """
        module_name, _, attribute = function.partition(":")
        with self.in_use():
            what = f"{where}: cannot import {module_name!r}"
            with nullcontext() if impure else refusing_nondeterminism(what):
                found = self._import(module_name, where)
            self.observer.note_import(module_name, None)
            for name in attribute.split("."):
                try:
                    present = hasattr(found, name)
                    value = getattr(found, name) if present else None
                except KeyboardInterrupt:
                    raise
                except BaseException as error:
                    raise ManifestError(
                        f"{where}: cannot read {attribute!r} of {module_name!r}: "
                        f"{self.describe(error)}"
                    ) from error
                if not present:
                    near = nearest(name, tuple(vars(found)) if hasattr(found, "__dict__") else ())
                    raise ManifestError(
                        f"{where}: {module_name!r} has no {attribute!r}",
                        hint=f"did you mean {near!r}?" if near else None,
                    )
                found = value
        return found

    @contextmanager
    def tracing(self, what: str, hint: str = _TRACING_HINT) -> Iterator[None]:
        """Run code of the user inside the block; what it raises becomes a BuildError.

        Args:
            what: what failed then, with its place in the manifest, for the error.
            hint: what the user can do about it.

        Raises:
            BuildError: the code raised; the error holds the line of the user's code.
        """
        with self.in_use():
            try:
                yield
            except (KeyboardInterrupt, PrejitError):
                raise
            except BaseException as error:
                if type(error).__name__ == "TraceContextError":  # flax's, which may not be imported
                    hint = _TRAINING_HINT
                raise BuildError(f"{what}: {self.describe(error)}", hint=hint) from error

    def _import(self, module_name: str, where: str) -> Any:
        try:
            found = importlib.import_module(module_name)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            hint = "import it in Python to see the whole traceback"
            if isinstance(error, ImportError):
                hint = "put the module beside the manifest, or install it into this environment"
            if isinstance(error, ModuleNotFoundError) and (near := self._nearest(error.name or "")):
                hint = f"did you mean {near!r}?"
            raise ManifestError(
                f"{where}: cannot import {module_name!r}: {self.describe(error)}", hint=hint
            ) from error
        self._refuse_other(module_name.partition(".")[0], where)
        return found

    def _refuse_other(self, name: str, where: str) -> None:
        """Refuse a module of Python or of a package in place of one of its name beside the manifest."""
        file = getattr(sys.modules.get(name), "__file__", None) or ""
        places = (Path(self._directory, f"{name}.py"), Path(self._directory, name, "__init__.py"))
        beside = next((place for place in places if place.is_file()), None)
        if self._apart and beside is not None and (not file or is_installed(file)):
            raise ManifestError(
                f"{where}: expected {name!r} to be {beside}, found {file or 'a module in Python itself'}, "
                "which prejit has imported already",
                hint=f"rename {beside if beside.stem == name else beside.parent}",
            )

    def _nearest(self, missing: str) -> str | None:
        """Return the module that was probably meant: one of the same package, or beside the manifest."""
        package, _, name = missing.rpartition(".")
        paths = getattr(sys.modules.get(package), "__path__", [self._directory])
        near = nearest(name, (each.name for each in pkgutil.iter_modules([*paths])))
        return near and f"{package}.{near}".lstrip(".")

    def search_path(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the portable paths of the directories before and behind `sys.path` for these modules."""
        own = self._path or [self._directory, *sys.path]
        shared = [place for place, entry in enumerate(own) if entry in sys.path]
        first, last = (min(shared), max(shared)) if shared else (len(own), len(own))

        def portable(entries: list[str]) -> tuple[str, ...]:
            return tuple(portable_path(os.path.abspath(each), self._directory) for each in entries)

        return portable(own[:first]), portable(own[last + 1 :])

    def present(self) -> Present:
        """Return what reads the inputs of these modules as they are now."""
        return Present(Path(self._directory), *self.search_path())

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Use these modules inside the block, and send what they print to stderr. Blocks may nest."""
        self._depth += 1
        try:
            with ending_forks():
                if self._depth > 1 or not self._apart:
                    yield
                else:
                    with self._alone():
                        yield
        finally:
            self._depth -= 1

    @contextmanager
    def _alone(self) -> Iterator[None]:
        path, modules = list(sys.path), dict(sys.modules)
        before = _Settings.now()
        if not self._path:
            self.observer.note_loaded(modules)
        self._path_before = path
        sys.path[:] = self._path or [self._directory, *path]
        sys.modules.update(self._own)
        importlib.invalidate_caches()  # the module may be newer than the importer's caches
        self._settings.apply()
        originals = Patches.now()
        self._patches.apply()
        try:
            with _printing_to_stderr(), observing(self.observer), refusing_exit():
                yield
        except Exception as error:
            if isinstance(error, PrejitError) or not (left := str(Patches.now().since(originals))):
                raise
            raise BuildError(
                f"{self._directory}: the code of this manifest replaced {left}, which prejit uses: "
                f"{type(error).__name__}: {_text(error)}",
                hint="put it back when your code is done",
            ) from error
        finally:
            self._patches = Patches.now().since(originals)
            originals.of(self._patches).apply()
            self._path = list(sys.path)
            self._roots |= {os.path.abspath(entry) for entry in {*sys.path} - {*path}}
            self._own = {
                name: module
                for name, module in list(sys.modules.items())
                if modules.get(name) is not module and self._is_own(name)
            }
            for name in self._own:
                if name in modules:
                    sys.modules[name] = modules[name]
                else:
                    del sys.modules[name]
            sys.path[:] = path
            self._settings = _Settings.now().since(before)
            before.since(_Settings.now()).apply()

    def _is_own(self, name: str) -> bool:
        """Return whether a module is from the manifest's directory, or one that the user's code added."""
        spec = getattr(sys.modules.get(name.partition(".")[0]), "__spec__", None)
        if spec is None:
            return False
        places = list(spec.submodule_search_locations or ()) or [spec.origin or ""]
        return any(os.path.dirname(os.path.abspath(place)) in self._roots for place in places)

    def describe(self, error: BaseException) -> str:
        """Return the text of an exception, with the line of the user's code that raised it."""
        text = f"{type(error).__name__}: {_text(error)}".removesuffix(": ")
        if isinstance(error, SyntaxError) and error.filename is not None:
            return f"{type(error).__name__}: {error.msg} ({error.filename}, line {error.lineno})"
        lines = [
            (frame.f_code.co_filename, line)
            for frame, line in traceback.walk_tb(error.__traceback__)
            if self._is_users(frame)
        ]
        if not lines:
            return text
        file, line = lines[-1]
        return f"{text} ({file}, line {line})"

    def _is_users(self, frame: FrameType) -> bool:
        """Return whether code is in a directory of the user, and not in a package installed there."""
        file = frame.f_code.co_filename
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package == "prejit" or package in sys.stdlib_module_names:
            return False
        added = map(os.path.abspath, {*sys.path} - {*self._path_before})
        return not is_in_package(file) and any(
            file.startswith(root + os.sep) for root in (*self._roots, *added)
        )


@dataclass(frozen=True)
class _Settings:
    """Settings of the process that a module may change. None stands for an unset environment variable."""

    environ: Mapping[str, str | None] = field(default_factory=dict)
    jax: Mapping[str, Any] = field(default_factory=dict)
    directory: str | None = None

    @classmethod
    def now(cls) -> _Settings:
        """Return the present settings."""
        jax = sys.modules.get("jax")
        directory = None
        with suppress(OSError):  # the directory was deleted
            directory = os.getcwd()
        return cls(dict(os.environ), {} if jax is None else dict(jax.config.values), directory)

    def since(self, before: _Settings) -> _Settings:
        """Return the settings that differ from those before."""
        names = {*self.environ, *before.environ}
        environ = {
            name: self.environ.get(name)
            for name in names
            if self.environ.get(name) != before.environ.get(name)
        }
        jax = {
            name: value
            for name, value in self.jax.items()
            if name in before.jax and before.jax[name] != value
        }
        return _Settings(
            environ, jax, None if self.directory == before.directory else self.directory
        )

    def apply(self) -> None:
        """Apply the settings to the process."""
        for name, value in self.environ.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        for name, value in self.jax.items():
            with suppress(Exception):  # some cannot change once jax has a device
                sys.modules["jax"].config.update(name, value)
        if self.directory is not None:
            with suppress(OSError):
                os.chdir(self.directory)


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # the user's class may fail in __str__
        return "no text"


@contextmanager
def _printing_to_stderr() -> Iterator[None]:
    """Send stdout to stderr, also that of C code and child processes: stdout is for prejit's data."""
    with ExitStack() as stack:
        stderr = Unbreakable(sys.stderr)
        with suppress(OSError, ValueError, AttributeError):  # closed, or nobody reads it
            sys.stdout.flush()
        with suppress(OSError):
            saved = os.dup(_STDOUT)
            stack.callback(os.close, saved)
            os.dup2(_STDERR, _STDOUT)
            stack.callback(os.dup2, saved, _STDOUT)
        stack.enter_context(redirect_stdout(stderr.as_text()))
        stack.enter_context(redirect_stderr(stderr.as_text()))
        yield


_GUARDED: tuple[ModuleType, ...] = (builtins, os)
"""Modules whose functions prejit uses and the user's code may replace."""
_MISSING = object()


@contextmanager
def refusing_exit() -> Iterator[None]:
    """Make `os._exit` raise SystemExit inside the block, but not in processes that the code forks."""
    leave, own = os._exit, os.getpid()

    def refuse(status: int) -> None:
        if os.getpid() != own:
            leave(status)
        raise SystemExit(f"os._exit({status})")

    os._exit = refuse  # type: ignore[assignment]
    try:
        yield
    finally:
        os._exit = leave


@contextmanager
def ending_forks() -> Iterator[None]:
    """End a process that code in the block forked, and that leaves the block: only prejit's own goes on."""
    leave, own, write = os._exit, os.getpid(), os.write
    try:
        yield
    finally:
        if os.getpid() != own:
            write(
                2,
                b"a process that the function forked returned from it: prejit ends that process\n",
            )
            leave(1)


@dataclass(frozen=True)
class Patches:
    """Functions of Python's own modules that the user's code replaced, with the new values.

    Attributes:
        names: the values by module and name. A missing one was deleted.
        modules: entries of `sys.modules` that were replaced.
    """

    names: Mapping[tuple[str, str], Any] = field(default_factory=dict)
    modules: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def now(cls) -> Patches:
        """Return the present values of everything that is guarded."""
        names = {
            (module.__name__, name): value
            for module in _GUARDED
            for name, value in vars(module).items()
        }
        own = sys.stdlib_module_names
        modules = {n: m for n, m in sys.modules.items() if n.partition(".")[0] in own}
        return cls(names, modules)

    def since(self, before: Patches) -> Patches:
        """Return the values that replaced others. New names count as none."""
        return Patches(_replaced(self.names, before.names), _replaced(self.modules, before.modules))

    def of(self, names: Patches) -> Patches:
        """Return the values that the names of others have here."""
        return Patches(
            {name: self.names.get(name, _MISSING) for name in names.names},
            {name: self.modules.get(name, _MISSING) for name in names.modules},
        )

    def apply(self) -> None:
        """Put the values in place."""
        by_name = {module.__name__: vars(module) for module in _GUARDED}
        for (module, name), value in self.names.items():
            _put(by_name[module], name, value)
        for name, value in self.modules.items():
            _put(sys.modules, name, value)

    def __str__(self) -> str:
        """Return the names as code has them."""
        found = [".".join(each) for each in self.names]
        return ", ".join((*found, *(f"sys.modules[{name!r}]" for name in self.modules)))


def _replaced(now: Mapping[Any, Any], before: Mapping[Any, Any]) -> dict[Any, Any]:
    found = {name: now.get(name, _MISSING) for name in before}
    return {name: value for name, value in found.items() if value is not before[name]}


def _put(values: dict[str, Any], name: str, value: Any) -> None:
    if value is _MISSING:
        values.pop(name, None)
    else:
        values[name] = value
