"""How many CPUs XLA sees while it compiles: CPUS, whatever the build host has.

XLA:CPU fixes at compile time into how many parts it splits a loop, by the CPUs that the process may run on.
No flag sets that: XLA asks the kernel (sched_getaffinity). So the process that compiles has a filter by which
the kernel hands that one question to its parent, which answers it (seccomp_unotify(2)):

    child   `install`: from now on its questions wait for an answer; gives a descriptor for the parent
    parent  `answer`: whenever that descriptor can be read

Where a kernel or a container forbids that, XLA sees the CPUs of the build host, and their number is in keys.
"""

from __future__ import annotations

import array
import ctypes
import fcntl
import os
import platform
import socket
import struct
from contextlib import suppress
from functools import cache

CPUS = 16
"""As a small server has. XLA splits a loop that computes into at most as many parts, one that waits for
memory into the square root of that. However many threads a machine has, they share the parts."""

_CALLS = {
    # seccomp, sched_getaffinity (asm/unistd.h), and the architecture (linux/audit.h).
    "x86_64": (317, 204, 0xC000003E),
    "aarch64": (277, 123, 0xC00000B7),
}
_SET_MODE_FILTER, _GET_ACTION_AVAIL = 1, 2  # of seccomp; this and what follows: linux/seccomp.h
_NEW_LISTENER = 8
_RET_ALLOW, _RET_USER_NOTIF = 0x7FFF0000, 0x7FC00000
_NOTIF_RECV, _NOTIF_SEND = 0xC0502100, 0xC0182101
_CONTINUE = 1
_QUESTION = struct.Struct(
    "=QIIiIQ6Q"
)  # id, pid, flags; number, architecture, place and arguments of the call
_ANSWER = struct.Struct("=QqiI")  # id, result, error, flags
_PR_SET_NO_NEW_PRIVS = 38  # linux/prctl.h
_MASK = ((1 << CPUS) - 1).to_bytes(CPUS // 8, "little").ljust(8, b"\0")


class _Step(ctypes.Structure):
    """struct sock_filter (linux/filter.h)."""

    _fields_ = (
        ("code", ctypes.c_ushort),
        ("if_true", ctypes.c_ubyte),
        ("if_false", ctypes.c_ubyte),
        ("value", ctypes.c_uint),
    )


class _Filter(ctypes.Structure):
    """struct sock_fprog (linux/filter.h)."""

    _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.POINTER(_Step)))


@cache
def seen_by_xla() -> int:
    """Return how many CPUs XLA sees while it compiles here: CPUS, or those of this process."""
    return CPUS if _can_answer() else len(os.sched_getaffinity(0))


def _can_answer() -> bool:
    if (calls := _CALLS.get(platform.machine())) is None:
        return False
    action = ctypes.c_uint(_RET_USER_NOTIF)
    return _libc().syscall(calls[0], _GET_ACTION_AVAIL, ctypes.c_long(0), ctypes.byref(action)) == 0


def install(to_parent: socket.socket) -> None:
    """Hand all later questions of this process for its CPUs to another one, if the kernel allows it.

    Args:
        to_parent: sends that process the descriptor to `answer` them by.
    """
    if not _can_answer():
        return
    seccomp, sched_getaffinity, architecture = _CALLS[platform.machine()]
    load, equal, end = (
        0x20,
        0x15,
        0x06,
    )  # BPF_LD | BPF_W | BPF_ABS, BPF_JMP | BPF_JEQ | BPF_K, BPF_RET
    steps = (_Step * 6)(
        _Step(load, 0, 0, 4),  # the architecture
        _Step(equal, 0, 3, architecture),
        _Step(load, 0, 0, 0),  # the number of the call
        _Step(equal, 0, 1, sched_getaffinity),
        _Step(end, 0, 0, _RET_USER_NOTIF),
        _Step(end, 0, 0, _RET_ALLOW),
    )
    filter_ = _Filter(len(steps), steps)
    libc = _libc()
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)  # or only root may have a filter
    listener = libc.syscall(seccomp, _SET_MODE_FILTER, _NEW_LISTENER, ctypes.byref(filter_))
    if listener >= 0:
        socket.send_fds(to_parent, [b"."], [listener])
        os.close(listener)


def answer(listener: int) -> None:
    """Answer one question of a process that `install`ed a filter: it may run on CPUS CPUs.

    Where its memory cannot be written, the kernel answers as it would have without us.
    """
    content = array.array("B", bytes(_QUESTION.size))
    with suppress(OSError):  # it is gone, or was interrupted: then it asks again
        fcntl.ioctl(listener, _NOTIF_RECV, content)
        number, process, _, _, _, _, _, size, place, *_ = _QUESTION.unpack(content)
        result, flags = 0, _CONTINUE
        with suppress(OSError):
            if size >= len(_MASK):
                with open(f"/proc/{process}/mem", "r+b", buffering=0) as memory:
                    os.pwrite(memory.fileno(), _MASK, place)
                result, flags = len(_MASK), 0
        reply = array.array("B", _ANSWER.pack(number, result, 0, flags))
        fcntl.ioctl(listener, _NOTIF_SEND, reply)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
