"""jax without `jax/__init__.py`, until somebody wants it.

Importing all of jax costs more than loading a program. One CPU device needs nothing of it (executable.py);
arrays on a mesh, and to read those of a dtype that is not Python's, need the 44 modules that jaxlib asks
for. For them a placeholder package takes jax's place, and turns into the real one when anybody else, in any
thread, wants anything of it. `PREJIT_PLAIN_START=1` turns this off.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import threading
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any, final

from prejit.runtime.process import is_plain_start


@final
class _DeferredPackage(ModuleType):
    """Stands for jax until anybody else wants anything of it; then `jax/__init__` runs, see _Deferral.

    `importlib.util.LazyLoader` cannot do this: it would also run `__init__` for `import jax._src.config`,
    because the import system reads `jax.__path__` then.
    """

    def __getattr__(self, name: str) -> Any:
        deferral: _Deferral = self.__dict__["_prejit_deferral"]
        if name == "__path__":
            return deferral.path_of(self)
        deferral.end()
        if type(self) is ModuleType:
            return getattr(self, name)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


@final
class _Deferral:
    """Whether `jax/__init__` has run, and who imports modules of jax before that.

    jax's modules import each other in circles, and `__init__` is the one place where to enter them: a bare
    `import jax.export`, or `from jax._src import api`, fails. So it runs first, unless the modules are those
    that jaxlib wants, of which we know that they come alone.
    """

    def __init__(self, package: ModuleType) -> None:
        self._package = package
        self._paths: dict[ModuleType, Any] = {}
        self._lock = threading.RLock()
        self._begun = False
        self._ours: int | None = None
        self._guard(package)

    def _guard(self, package: ModuleType) -> None:
        self._paths[package] = package.__dict__.pop("__path__")
        package.__dict__["_prejit_deferral"] = self
        package.__class__ = _DeferredPackage

    @contextlib.contextmanager
    def imports_of_ours(self) -> Iterator[None]:
        """What this thread imports meanwhile does not run `__init__`; other threads wait."""
        with self._lock:
            before, self._ours = self._ours, threading.get_ident()
            try:
                yield
            finally:
                self._ours = before
            for name, module in [] if self._begun else list(sys.modules.items()):
                if name.startswith("jax.") and "__path__" in vars(module):
                    self._guard(module)

    def path_of(self, package: ModuleType) -> Any:
        """`__path__`, which the import system reads before it imports a module of a package."""
        if self._ours != threading.get_ident():
            # The reader holds the lock of the module that it imports, and a thread that runs `__init__` may
            # want that one: do not wait for such a thread, nor for ever for one that imports for us.
            deadline = time.monotonic() + 10.0
            while not self._begun and time.monotonic() < deadline:
                if self._lock.acquire(timeout=0.01):
                    try:
                        self.end()
                    finally:
                        self._lock.release()
        return self._paths[package]

    def end(self) -> None:
        """Runs `__init__`, once."""
        with self._lock:
            if self._begun:
                return  # done, or in this very thread
            self._begun = True
            for package, path in self._paths.items():
                package.__dict__["__path__"] = path
                if package is not self._package:
                    package.__class__ = ModuleType
            self._package.__spec__.loader.exec_module(self._package)  # type: ignore[union-attr]
            # No __getattr__ of ours any more. jax may have set one of its own (deprecations).
            self._package.__class__ = ModuleType


def defer_jax() -> None:
    """Puts a placeholder in jax's place, unless jax is imported already or the start is to be plain."""
    if "jax" in sys.modules or is_plain_start():
        return
    spec = importlib.util.find_spec("jax")
    if spec is None:
        return  # jaxlib says it better
    package = importlib.util.module_from_spec(spec)
    _Deferral(package)
    sys.modules["jax"] = package


def imports_of_ours() -> contextlib.AbstractContextManager[None]:
    """While jaxlib imports the modules of jax that it needs."""
    deferral = vars(sys.modules["jax"]).get("_prejit_deferral") if "jax" in sys.modules else None
    return deferral.imports_of_ours() if deferral is not None else contextlib.nullcontext()
