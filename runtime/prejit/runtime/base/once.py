"""A property that is computed once for each object, even if several threads read it first."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

_T = TypeVar("_T")
_lock = threading.Lock()
"""Held while a lock is made for an object."""


class once(Generic[_T]):  # noqa: N801 (a decorator)
    """A decorator like functools.cached_property, with a lock for each object.

    functools.cached_property has had no lock since Python 3.12. Threads that read the property at the same
    time wait for the first one. If the first one fails, it alone gets the exception, and the next one tries
    again.
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
        with _lock:  # one lock for all properties of an object, because one may read another
            lock = values.setdefault("_once", threading.RLock())
        with lock:
            if self._name not in values:
                values[self._name] = self._make(instance)
            made: _T = values[self._name]  # later reads find it there and do not call this method
            return made
