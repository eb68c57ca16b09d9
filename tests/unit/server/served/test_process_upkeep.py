"""The heap of a server: it does not lie free in the arenas of threads, and goes back to the system."""

import ctypes
import os
import re
import sys

import pytest

ARENAS = """
import ctypes, re, sys, threading
from prejit.server.served.process_upkeep import use_few_arenas
use_few_arenas()
libc = ctypes.CDLL(None)
together = threading.Barrier(12)
def allocate():
    together.wait()
    for size in range(64, 4096):
        libc.malloc(size)
    together.wait()
threads = [threading.Thread(target=allocate) for _ in range(12)]
for each in threads:
    each.start()
for each in threads:
    each.join()
libc.fopen.restype = libc.fdopen.restype = ctypes.c_void_p
out = ctypes.c_void_p(libc.fdopen(1, b"w"))
libc.malloc_info(0, out)
libc.fflush(out)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_info"), reason="needs glibc's malloc")
@pytest.mark.parametrize(("chosen", "expected"), [({}, 2), ({"MALLOC_ARENA_MAX": "5"}, 5)])
def test_threads_share_few_arenas(chosen, expected, run_python, monkeypatch):
    """Half of the heap of a busy server was free, in arenas of threads that needed no memory just then."""
    for name in [name for name in os.environ if "MALLOC" in name]:
        monkeypatch.delenv(name)
    assert run_python(ARENAS, env=chosen).stdout.count("<heap nr=") == expected


FREED = """
import ctypes, gc
from prejit.server.served.process_upkeep import trim
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
blocks = [libc.malloc(10_000) for _ in range(10_000)]
for block in blocks:
    ctypes.memset(block, 1, 10_000)
class Block:
    def __init__(self, pointer):
        self.cycle, self.pointer = self, pointer
    def __del__(self):
        libc.free(ctypes.c_void_p(self.pointer))
gc.disable()
for block in blocks[:-1]:  # the last one keeps the heap from ending before it
    Block(block)
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
before = resident()
trim()
print(before - resident())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs glibc's malloc")
def test_free_memory_goes_back_to_the_system(run_python):
    assert int(run_python(FREED).stdout) > 50_000_000


SMALL_PAGES = """
from prejit.server.served.process_upkeep import use_small_pages
use_small_pages()
print(open("/proc/self/status").read())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's prctl")
def test_huge_pages_are_off(run_python):
    """The kernel joined pages of the heap that were mostly free: they were resident again."""
    assert re.search(r"^THP_enabled:\s+0$", run_python(SMALL_PAGES).stdout, re.MULTILINE)
