"""Objects with threads: they end with the interpreter, are made once, and belong to one process."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, NoReturn, SupportsIndex, TypeVar, overload


def start_thread(target: Callable[[], object], name: str) -> threading.Thread | None:
    """Start a thread that the interpreter waits for at exit, and return it.

    By default a thread is a daemon if the thread that starts it is one. The interpreter stops daemons at exit
    wherever they are, and inside XLA that aborts the process. None: no thread can start, because there are
    too many, or the interpreter is exiting.
    """
    if not threading.main_thread().is_alive():
        return None
    thread = threading.Thread(target=target, name=name, daemon=False)
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread


_T = TypeVar("_T")


_lock = threading.Lock()
"""Held while a lock is made for an object."""


def making(instance: object) -> threading.RLock:
    """Return the lock that is held while a `once` property of an object is made.

    It is one for all of them, because one may read another.
    """
    with _lock:
        lock: threading.RLock = vars(instance).setdefault("_once", threading.RLock())
        return lock


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
        with making(instance):
            if self._name not in values:
                values[self._name] = self._make(instance)
            made: _T = values[self._name]  # later reads find it there and do not call this method
            return made


class OneProcess:
    """Base of objects that cannot be copied or pickled."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            f"cannot copy or pickle a {type(self).__name__.strip('_')} of prejit, which holds threads and "
            "memory of its process: send the path of the bundle, and load it where it is used, or arrays of "
            "NumPy"
        )


_disowning: weakref.WeakKeyDictionary[object, Callable[[Any], object]] = weakref.WeakKeyDictionary()


def disown_in_forks(each: _T, disown: Callable[[_T], object]) -> None:
    """Call a function with an object in each process that is forked from this one while the object lives.

    A fork has none of the threads that programs run in: a call would wait for them for ever. So `disown` lets
    the object refuse all calls, without taking a lock, which another thread may have held. It returns what
    must never be freed: a client of XLA waits for its threads then, also when the interpreter ends.
    """
    _disowning[each] = disown


def _disown() -> None:
    for each, disown in list(_disowning.items()):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(disown(each)))


os.register_at_fork(after_in_child=_disown)
