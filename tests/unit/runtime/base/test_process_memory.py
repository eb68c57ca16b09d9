"""Memory that is zeroed takes no pages, and is zero whatever the kernel does with them."""

import ctypes
import mmap
import os

import numpy as np
import pytest

from prejit.runtime.base.process_memory import zero
from prejit.runtime.device.device import Device


@pytest.mark.parametrize("flags", [mmap.MAP_PRIVATE, mmap.MAP_SHARED])
@pytest.mark.parametrize(("start", "size"), [(0, 40_000), (1, 4096), (5000, 20_000), (100, 7)])
def test_memory_is_zero_and_what_is_beside_it_stays(flags, start, size):
    with mmap.mmap(-1, 65_536, flags | mmap.MAP_ANONYMOUS) as memory:
        memory[:] = b"x" * len(memory)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        zero(address + start, size)
        assert memory[:] == b"x" * start + bytes(size) + b"x" * (len(memory) - start - size)


def test_pages_that_are_locked_are_zero_too():
    page = os.sysconf("SC_PAGE_SIZE")
    with mmap.mmap(-1, 4 * page, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory[:] = b"x" * len(memory)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        if ctypes.CDLL(None).mlock(ctypes.c_void_p(address + 2 * page), ctypes.c_size_t(page)):
            pytest.skip("this user may lock no memory")
        zero(address, len(memory))
        assert memory[:] == bytes(len(memory))


def resident_bytes():
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_large_zeros_take_memory_when_they_are_written():
    device = Device("cpu")
    device.zeros((1,), np.dtype(np.float32))
    before = resident_bytes()
    zeros = device.zeros((256 << 18,), np.dtype(np.float32))
    assert resident_bytes() - before < 64 << 20
    assert not np.asarray(memoryview(zeros)).any()
