"""Set the number of CPUs that XLA sees while it compiles to that of the target, whatever the build host has.

When XLA:CPU compiles a loop, it splits the loop into parts for the CPUs that its process may run on. No flag
sets their number; XLA calls sched_getaffinity. (It reads NPROC too, but not for all loops.) So a compiling
process installs a filter, and the kernel then passes this one system call to the parent process
(seccomp_unotify(2)):

    child   `show`: its calls wait for the parent from now on; sends the parent a descriptor
    parent  `answer`: answers one call whenever the descriptor can be read

Where a kernel or a container forbids such filters, the process gives up some of its CPUs, if it has more than
the target. If it has fewer, XLA sees those of the build host. The number that XLA sees is an ingredient of
keys.
"""

from __future__ import annotations

import array
import ctypes
import errno
import fcntl
import os
import platform
import socket
import struct
from contextlib import suppress
from functools import cache

from prejit.runtime.errors import BuildError

MAX_CPUS = 1024
"""Largest number of CPUs that XLA can see: that of glibc's cpu_set_t."""

_CALLS = {
    # seccomp, sched_getaffinity (asm/unistd.h), and the architecture (linux/audit.h).
    "x86_64": (317, 204, 0xC000003E),
    "aarch64": (277, 123, 0xC00000B7),
}
_SET_MODE_FILTER, _GET_ACTION_AVAIL = 1, 2  # of seccomp; this and what follows: linux/seccomp.h
_NEW_LISTENER, _WAIT_KILLABLE = 1 << 3, 1 << 5
_RET_ALLOW, _RET_USER_NOTIF = 0x7FFF0000, 0x7FC00000
_NOTIF_RECV, _NOTIF_SEND, _NOTIF_ID_VALID = 0xC0502100, 0xC0182101, 0x40082102
_CONTINUE = 1
# Id, pid, flags; number, architecture, place and arguments of the call.
_CALL = struct.Struct("=QIIiIQ6Q")
_ANSWER = struct.Struct("=QqiI")  # id, result, error, flags
_PR_SET_NO_NEW_PRIVS = 38  # linux/prctl.h


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


def seen_by_xla(cpus: int) -> int:
    """Return how many CPUs XLA sees while it compiles here for a target: the target's, or fewer."""
    return cpus if _can_answer() else min(cpus, len(os.sched_getaffinity(0)))


@cache
def _can_answer() -> bool:
    if (calls := _CALLS.get(platform.machine())) is None:
        return False
    action = ctypes.c_uint(_RET_USER_NOTIF)
    return _libc().syscall(calls[0], _GET_ACTION_AVAIL, ctypes.c_long(0), ctypes.byref(action)) == 0


def show(cpus: int, to_parent: socket.socket) -> None:
    """Let this process see a number of CPUs from now on, whatever it has.

    Args:
        cpus: the number, as `seen_by_xla` returns it.
        to_parent: socket that sends the parent the descriptor for `answer`.

    Raises:
        BuildError: the process sees another number, so its programs would not be what their keys say.
    """
    if _can_answer():
        _ask_parent(to_parent)
    else:
        ours = sorted(os.sched_getaffinity(0))
        first = os.getpid() % len(ours)  # so that workers do not all take the same
        os.sched_setaffinity(0, (ours[first:] + ours[:first])[:cpus])
    if (found := len(os.sched_getaffinity(0))) != cpus:
        raise BuildError(
            f"expected XLA to see {cpus} CPUs while it compiles, found that it sees {found}: the kernel or "
            "the container forbids that another process answers its system calls",
            hint=f"set cpus = {found} in the [[target]], or allow the seccomp filter and writing to "
            "/proc/PID/mem of child processes",
        )


def _ask_parent(to_parent: socket.socket) -> None:
    """Send later sched_getaffinity calls of this process to its parent, if the kernel allows it."""
    seccomp, sched_getaffinity, architecture = _CALLS[platform.machine()]
    # BPF_LD | BPF_W | BPF_ABS, BPF_JMP | BPF_JEQ | BPF_K, BPF_RET.
    load, equal, end = 0x20, 0x15, 0x06
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
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)  # otherwise only root may install a filter
    # Linux 5.19 knows the second flag.
    for flags in (_NEW_LISTENER | _WAIT_KILLABLE, _NEW_LISTENER):
        listener = libc.syscall(seccomp, _SET_MODE_FILTER, flags, ctypes.byref(filter_))
        if listener >= 0:
            break
    if listener >= 0:
        socket.send_fds(to_parent, [b"."], [listener])
        os.close(listener)


def answer(listener: int, cpus: int) -> None:
    """Answer one call of a process that `show` prepared: it may run on a number of CPUs.

    Where the memory of the process cannot be written, the kernel answers the call itself, and `show` refuses.
    A call that a signal interrupted waits no longer, and its memory may have another use. From Linux 5.19 on
    no signal interrupts a call that is being answered; before, the answer looks whether it still waits.
    """
    mask = ((1 << cpus) - 1).to_bytes(-(-cpus // 64) * 8, "little")
    content = array.array("B", bytes(_CALL.size))
    with suppress(OSError):  # the process has ended, or was interrupted and calls again
        fcntl.ioctl(listener, _NOTIF_RECV, content)
        number, process, _, _, _, _, _, size, place, *_ = _CALL.unpack(content)
        result, error, flags = 0, 0, _CONTINUE
        with suppress(OSError):
            if size < len(mask):
                # As the kernel answers; the caller tries a larger one.
                error, flags = -errno.EINVAL, 0
            else:
                with open(f"/proc/{process}/mem", "r+b", buffering=0) as memory:
                    fcntl.ioctl(listener, _NOTIF_ID_VALID, struct.pack("=Q", number))
                    os.pwrite(memory.fileno(), mask, place)
                result, flags = len(mask), 0
        reply = array.array("B", _ANSWER.pack(number, result, error, flags))
        fcntl.ioctl(listener, _NOTIF_SEND, reply)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
