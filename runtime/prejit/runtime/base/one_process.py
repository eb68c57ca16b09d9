"""Objects that belong to the process that made them: they hold its threads and its devices' memory."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable
from typing import Any, NoReturn, SupportsIndex, TypeVar

_T = TypeVar("_T")


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

    A fork has none of the threads that programs run in: a call would wait for them for ever.

    Args:
        each: the object, which is hashable.
        disown: lets the object refuse all calls, without taking a lock, which another thread may have held.
            It returns what must never be freed: a client of XLA waits for its threads then, also when the
            interpreter ends.
    """
    _disowning[each] = disown


def _disown() -> None:
    for each, disown in list(_disowning.items()):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(disown(each)))


os.register_at_fork(after_in_child=_disown)
