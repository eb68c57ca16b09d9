"""A property that is computed once for each object, however many threads ask for it first."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

_T = TypeVar("_T")
_lock = threading.Lock()
"""Held while an object gets its own lock."""


class once(Generic[_T]):  # noqa: N801 (a decorator)
    """As functools.cached_property, with a lock of each object, which that has not had since Python 3.12.

    Threads that ask at the same time wait for the first one; what it raises is raised to it alone, and the
    next one tries again.
    """

    def __init__(self, make: Callable[[Any], _T]) -> None:
        self._make = make
        self._name = make.__name__
        self.__doc__ = make.__doc__

    @overload
    def __get__(self, instance: None, owner: type[Any]) -> once[_T]: ...

    @overload
    def __get__(self, instance: object, owner: type[Any]) -> _T: ...

    def __get__(self, instance: object | None, owner: type[Any]) -> once[_T] | _T:
        if instance is None:
            return self
        values = vars(instance)
        with _lock:  # one for all of an object's properties: one may need another
            lock = values.setdefault("_once", threading.RLock())
        with lock:
            if self._name not in values:
                values[self._name] = self._make(instance)
            made: _T = values[self._name]  # found there from now on, without this method
            return made
