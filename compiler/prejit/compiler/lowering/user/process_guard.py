"""Keep the user's code from ending or changing prejit's own process, in which it runs."""

from __future__ import annotations

import builtins
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

_GUARDED: tuple[ModuleType, ...] = (builtins, os)
"""Modules of which prejit uses functions that the user's code may replace."""
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
    """What code of the user replaced in Python's own modules, with the new values.

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
