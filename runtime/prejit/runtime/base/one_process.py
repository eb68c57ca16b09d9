"""Objects that belong to the process that made them: they hold its threads and its devices' memory."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable
from typing import NoReturn, SupportsIndex


class OneProcess:
    """Base of objects that cannot be copied or pickled."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            f"cannot copy or pickle a {type(self).__name__.strip('_')} of prejit, which holds threads and "
            "memory of its process: send the path of the bundle, and load it where it is used"
        )


_disowning: set[weakref.WeakMethod[Callable[[], object]]] = set()


def disown_in_forks(disown: Callable[[], object]) -> None:
    """Call a method in each process that is forked from this one while the method's object lives.

    A fork has none of the threads that programs run in: a call would wait for them for ever.

    Args:
        disown: lets the object refuse all calls, without taking a lock, which another thread may have held.
            It returns what must never be freed: a client of XLA waits for its threads then, also when the
            interpreter ends.
    """
    _disowning.add(weakref.WeakMethod(disown, _disowning.discard))


def _disown() -> None:
    for method in list(_disowning):
        if (disown := method()) is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(disown()))


os.register_at_fork(after_in_child=_disown)
