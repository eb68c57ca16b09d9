"""Helper threads of native kernels: one set a process, and no more of them than it may use."""

import os
import shutil

import pytest

from prejit.compiler.native.kernel_library import SOURCES, KernelLibrary, build_kernels
from prejit.compiler.store.directory_store import DirectoryStore
from prejit.runtime.format.checks.elf import find_note, read_shared_library

from .kernel_builds import TESTS
from .test_kernel_library import toolchain

OWNER, VERSION = b"prejit\0", 2
CPUS = len(os.sched_getaffinity(0))
several_cpus = pytest.mark.skipif(CPUS < 2, reason="one CPU has no helpers")
SCRIPT = """
import ctypes, os, sys
from prejit.runtime.device import kernels
def helpers():
    return len(os.listdir("/proc/self/task")) - alone
def function(library, name):
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    (capsule,) = (each for at, each in library.items() if at.startswith(name))
    kind = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
    return kind(get(capsule, None))
def load(path):
    library = kernels.load(open(path, "rb").read())
    return function(library, "prejit_sum"), function(library, "prejit_threads")
alone = len(os.listdir("/proc/self/task"))
"""
COUNT = f"""{SCRIPT}
for path in sys.argv[1:]:
    add, threads = load(path)
    assert add(100, 3) == 3 * sum(range(100))
    print(threads(0, 0) & 0xffff, helpers())
"""


@pytest.fixture(scope="module", params=["g++", "zig"])
def library(request, tmp_path_factory):
    """threads.cc and a probe, made as kernels are."""
    directory = tmp_path_factory.mktemp("threads")
    for path in (SOURCES / "threads.cc", SOURCES / "threads.h", TESTS / "threads_probe.cc"):
        shutil.copy(path, directory)
    cache = DirectoryStore.open(directory / "cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", request.param)
        built = build_kernels(toolchain(), cache, sources=directory)
    if not isinstance(built, KernelLibrary) or not built.compiler.startswith(request.param):
        pytest.skip(f"no {request.param} on this machine")
    content = cache.read_blob(built.digest)
    assert content is not None
    return content


@pytest.fixture
def in_process(tmp_path, run_python):
    """Runs a script in a fresh process with libraries: `in_process(COUNT, library, another(library))`."""

    def run(code, *contents, env=None, status=0):
        paths = [tmp_path / f"{place}.so" for place in range(len(contents))]
        for path, content in zip(paths, contents, strict=True):
            path.write_bytes(content)
        return run_python(code, *paths, env=env, status=status)

    return run


@pytest.fixture
def counted(in_process):
    """Gives the threads that each library says it uses and the helpers in the process after its call."""

    def count(*contents, **env):
        lines = in_process(COUNT, *contents, env=env).stdout.splitlines()
        return [(int(threads), int(helpers)) for threads, helpers in map(str.split, lines)]

    return count


def another(library):
    """The same with another digest: a bundle's of another build."""
    return library + b"\0"


def test_what_shares_threads_is_a_kernel_with_a_note_within_the_library(library):
    assert read_shared_library(library).exported == ("prejit_sum", "prejit_threads")
    found = find_note(library, b"prejit")
    assert found is not None
    assert found[1][:4] == VERSION.to_bytes(4, "little")
    assert find_note(library, b"nobody") is None
    with pytest.raises(ValueError, match="not an ELF file of 64 bits"):
        find_note(b"", b"prejit")
    for end in (30, 61, 200):
        with pytest.raises(ValueError, match="not a whole ELF file"):
            find_note(library[:end], b"prejit")


@several_cpus
@pytest.mark.parametrize("what", ["version", "owner"])
def test_a_library_of_other_helpers_is_given_those_of_the_first(what, library, counted):
    """Of a later release, which shares them in another way, or an older one, which has no note."""
    at, changed = library.index(OWNER) + 8, bytearray(library)
    assert library[at : at + 4] == VERSION.to_bytes(4, "little")
    if what == "version":
        changed[at] = VERSION + 1
    else:
        changed[at - 8 : at] = b"nobody\0\0"
    all_helpers = [(CPUS, CPUS - 1), *[(CPUS, 2 * (CPUS - 1))] * 2]
    assert counted(library, bytes(changed), another(library)) == all_helpers


def test_the_setting_is_taken_if_it_is_a_number(library, counted, in_process):
    assert counted(library, another(library), PREJIT_THREADS="1") == [(1, 0)] * 2
    assert counted(library, PREJIT_THREADS=str(CPUS + 7)) == [(CPUS, CPUS - 1)]
    done = in_process(COUNT, library, env={"PREJIT_THREADS": "0"}, status=1)
    expected = "UsageError: PREJIT_THREADS: expected an integer of at least 1, found '0'"
    assert expected in done.stderr


AT_ONCE = f"""{SCRIPT}
import threading
libraries = [load(path) for path in sys.argv[1:]]
wrong = []
def work(add):
    if add(64, 2000) != 2000 * sum(range(64)):
        wrong.append(add)
def all_at_once():
    threads = [threading.Thread(target=work, args=(add,)) for add, _ in libraries * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
all_at_once()
child = os.fork()
if child == 0:
    all_at_once()
    os._exit(len(wrong))
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert not wrong
print(helpers())
"""


def test_no_block_is_lost(library, in_process):
    quiet = {"PYTHONWARNINGS": "ignore"}  # that threads and fork do not go together
    done = in_process(AT_ONCE, library, another(library), env=quiet)
    assert done.stdout == f"{CPUS - 1}\n"


MOVED = f"""{SCRIPT}
add, _ = load(sys.argv[1])
before = set(map(int, os.listdir("/proc/self/task")))
add(64, 10)
(tid,) = (int(each) for each in os.listdir("/proc/self/task") if int(each) not in before)
every = os.sched_getaffinity(0)
mine = min(every)
for _ in range(100):
    os.sched_setaffinity(tid, {{mine}})
    os.sched_setaffinity(0, {{mine}})
    os.sched_setaffinity(0, every)  # it is still there
    assert add(64, 10) == 10 * sum(range(64))
    if os.sched_getaffinity(tid) == every:
        break
else:
    raise AssertionError("the helper stays where this thread runs")
os.sched_setaffinity(tid, {{mine}})
os.sched_setaffinity(0, {{mine}})
assert add(64, 10) == 10 * sum(range(64)), "there is no other core"
assert os.sched_getaffinity(tid) == {{mine}}
"""


@several_cpus
def test_a_helper_leaves_the_core_of_the_thread_that_calls(library, in_process):
    """XLA runs each program in another of its threads, which may be woken where a helper polls."""
    in_process(MOVED, library, env={"PREJIT_THREADS": "2"})
