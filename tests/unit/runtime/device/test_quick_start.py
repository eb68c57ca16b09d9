"""A start is quick, and a host program does not notice how."""

import gc
import importlib.util
import json
import shutil
from pathlib import Path

import pytest

from prejit.runtime.device import quick_start
from prejit.runtime.device.quick_start import PAGE_BYTES, collector_off
from prejit.runtime.machine.kept_files import first_programs

WATCHED = """
import gc, os, sys, threading
seen = []
class Watch:
    def find_spec(self, name, path, target=None):
        if name in ("numpy", "jaxlib._jax"):
            seen.append((name, gc.isenabled(), os.environ.get("OPENBLAS_THREAD_TIMEOUT")))
            opened.append(any(t.name == "prejit-open-jaxlib" for t in threading.enumerate()))
opened = []
sys.meta_path.insert(0, Watch())
started = []
threading.Thread.start = (lambda start: lambda self: (started.append(self.name), start(self))[1])(
    threading.Thread.start
)
"""
CALL = """
from prejit.runtime import load
bundle = load({path!r}, on_mismatch="error")
import numpy as np
assert bundle.call("score", x=np.ones((2, 16), np.float32)).shape == (2, 4)
"""


def test_a_start_is_quick_and_leaves_nothing_behind(settled_dir, run_python):
    """The collector looks at nothing between numpy, which comes with `load`, and the end of a load."""
    done = run_python(
        WATCHED
        + "found = []\n"
        + "gc.callbacks.append(lambda *_: found.append(1) if 'numpy' in sys.modules else None)\n"
        + "from prejit.runtime.device import quick_start\nread = []\n"
        + "quick_start.read_ahead = read.append\n"
        + "import prejit.runtime\nassert 'numpy' not in sys.modules\n"
        + CALL.format(path=str(settled_dir)).replace(
            "import numpy", "assert not found\nimport numpy"
        )
        + "assert seen == [('numpy', False, '4'), ('jaxlib._jax', False, None)], seen\n"
        + "assert 'prejit-open-jaxlib' in started, started\n"
        + "assert len(read) == 1, read  # of jaxlib's library\n"
        + "try:\n    load('/no/such/bundle')\nexcept prejit.runtime.StoreError: pass\n"
        + "assert gc.isenabled() and 'OPENBLAS_THREAD_TIMEOUT' not in os.environ\n"
        + "heavy = {'prejit.runtime.encoding.encoder', 'secrets', 'asyncio'} & set(sys.modules)\n"
        + "assert not heavy, heavy",
        env={"PYTHONPROFILEIMPORTTIME": "1"},  # a start can be timed
    )
    assert "jaxlib._jax" in done.stderr
    assert "pjrt_client" not in done.stderr, "XLA's library was opened before its log level was set"


THREADED = (
    "import threading\nresting = threading.Event()\nthreading.Thread(target=resting.wait).start()"
)
AS_EVER = [("numpy", True, None), ("jaxlib._jax", True, None)]
"""The settings after a start that changes none: the collector is on, and OpenBLAS has no time limit."""


@pytest.mark.parametrize(
    ("before", "env", "seen", "after"),
    [
        (
            *("", {"PREJIT_PLAIN_START": "1"}, AS_EVER),
            "assert 'prejit-open-jaxlib' not in started, started\n"
            "assert 'numpy' in vars(sys.modules['jax']), 'jax is imported as anybody does'",
        ),
        (THREADED, {}, AS_EVER, "resting.set()"),
        (
            *(THREADED.replace("wait)", "wait, name='prejit-open-jaxlib')"), {}),
            [("numpy", False, None), ("jaxlib._jax", False, None)],
            "resting.set()",  # a library that is still opened keeps no collector on
        ),
        (
            *("import gc\ngc.disable()", {"OPENBLAS_THREAD_TIMEOUT": "20"}),
            [("numpy", False, "20"), ("jaxlib._jax", False, "20")],
            "assert not gc.isenabled()\nassert os.environ['OPENBLAS_THREAD_TIMEOUT'] == '20'",
        ),
    ],
    ids=["plain", "beside threads of the host", "beside one of ours", "settings of the host"],
)
def test_nothing_is_set_where_a_host_notices(before, env, seen, after, settled_dir, run_python):
    """Threads of the host make garbage, read the environment, and start processes that inherit it."""
    code = CALL.format(path=str(settled_dir))
    run_python(f"{before}{WATCHED}{code}{after}\nassert seen == {seen!r}, seen", env=env)


@pytest.mark.parametrize(
    "host", ["import jax; jax.numpy.ones(3)", "import numpy, ml_dtypes, tokenizers, zstandard"]
)
def test_a_host_may_import_in_a_thread(host, settled_dir, run_python):
    run_python(
        "import threading\nfrom prejit.runtime import load\nerrors = []\n"
        f"def other():\n    try:\n        {host}\n"
        "    except BaseException as error:\n        errors.append(error)\n"
        "thread = threading.Thread(target=other)\nthread.start()\n"
        f"{CALL.format(path=str(settled_dir))}\nthread.join()\nassert not errors, errors\n"
        "import jax\nassert float(jax.jit(lambda x: x * 2)(np.float32(3))) == 6\n"
    )


def test_a_host_may_fork_as_soon_as_load_is_imported(run_python):
    """The thread that opens jaxlib's library is over by then. A child would get half of the library."""
    run_python(
        "import os, threading\nfrom prejit.runtime import load\nif (child := os.fork()) == 0:\n"
        "    import jaxlib._jax\n    os._exit(0)\n"
        "assert threading.enumerate() == [threading.main_thread()]\n"
        "assert os.waitpid(child, 0)[1] == 0"
    )


GENERATE = """
import os, sys, time
from prejit.runtime import load
bundle = load({path!r}, on_mismatch="error")
def loaded():
    return sorted(r.program for r in bundle.report() if r.source == "loaded")
def settle(seconds):
    end = time.monotonic() + seconds
    while bundle._programs._working and time.monotonic() < end:
        time.sleep(0.01)
def tokens(prompt):
    return bundle.generate(prompt, max_new_tokens=4, stop_token_ids=()).token_ids
"""


def test_a_start_loads_at_once_what_the_last_one_wanted(decoder_dir, runtime_cache, run_python):
    """It is a guess and no more: in a file of anybody's making, it fails nothing."""
    code = GENERATE.format(path=str(decoder_dir))
    nothing = "assert not bundle._programs._working, 'nothing is known yet'\n"
    first = run_python(f"{code}{nothing}print(tokens([1, 2, 3]))").stdout
    [file] = (runtime_cache / "starts").rglob("*.json")
    written, right = file.stat().st_mtime_ns, file.read_bytes()
    wanted = json.loads(right)
    assert len(wanted) == 1
    check = f"settle(60)\nassert loaded() == {wanted[:1]}, loaded()\n"
    assert run_python(f"{code}{check}print(tokens([1, 2, 3]))").stdout == first
    assert file.stat().st_mtime_ns == written, "nothing new: nothing is written"
    plain = {"PREJIT_PLAIN_START": "1"}  # does not read what is remembered
    run_python(f"{code}settle(60)\nassert not loaded()\ntokens([1, 2])", env=plain)
    for content in (b"", b"{}", b"[1]", b"\xff", b"[" * 9999):
        file.write_bytes(content)
        assert first_programs(f"sha256:{file.stem}") == ()
    file.write_bytes(b'["no such program", "decode/b9"]')
    assert run_python(f"{code}settle(60)\nprint(tokens([1, 2, 3]))").stdout == first
    assert file.read_bytes() == right, "what was wanted is remembered instead"


@pytest.fixture
def alone(monkeypatch):
    """As in a process without other threads (pytest-xdist has one), with the collector on."""
    monkeypatch.setattr("prejit.runtime.device.quick_start.is_alone", lambda *_: True)
    assert gc.isenabled()
    gc.unfreeze()  # what conftest.py leaves out
    yield
    gc.unfreeze()
    gc.enable()


def test_code_that_only_loading_runs_leaves_the_page_tables(settled_dir, run_python):
    load = f"""
import re, threading
from prejit.runtime import load
load({str(settled_dir)!r}, on_mismatch="error")
for thread in threading.enumerate():
    if thread.name == "prejit-unmap-libraries":
        thread.join()
smaps = open("/proc/self/smaps").read()
for library in "libjax_common", "libscipy_openblas":
    print(re.search(rf"r-xp .*/{{library}}.*\\n(?:.*\\n)*?Rss: +(\\d+) kB", smaps)[1])
"""
    ours, plain = (
        list(map(int, run_python(load, env={"PREJIT_PLAIN_START": value}).stdout.split()))
        for value in ("", "1")
    )
    assert len(ours) == 2
    assert all(few < many / 2 for few, many in zip(ours, plain, strict=True)), (ours, plain)


def test_code_that_somebody_wrote_is_kept(tmp_path, run_python):
    """A debugger's breakpoints, and what a profiler put in front of a function."""
    library = tmp_path / "_ml_dtypes_ext.copy.so"
    shutil.copy(importlib.util.find_spec("ml_dtypes._ml_dtypes_ext").origin, library)
    run_python(f"""
import ctypes
from prejit.runtime.device import quick_start
ctypes.CDLL({str(library)!r})
[code] = [line for line in open("/proc/self/maps") if "ext.copy" in line and " r-xp " in line]
start, end = (int(each, 16) for each in code.split()[0].split("-"))
libc = ctypes.CDLL(None)
assert libc.mprotect(ctypes.c_void_p(start), ctypes.c_size_t(end - start), 7) == 0
ctypes.memset(start + 100, 0xCC, 1)
assert libc.mprotect(ctypes.c_void_p(start), ctypes.c_size_t(end - start), 5) == 0
quick_start._unmap()
assert ctypes.string_at(start + 100, 1)[0] == 0xCC
""")


@pytest.mark.usefixtures("alone")
def test_nothing_looks_through_the_new_objects_and_settings_of_the_host_stay():
    def collections():
        return sum(one["collections"] for one in gc.get_stats())

    gc.collect()
    before = collections()
    with collector_off():
        assert not gc.isenabled()
        made = [[number] for number in range(10 * gc.get_threshold()[0])]
    assert gc.isenabled()
    for _ in range(gc.get_threshold()[0] // 2):  # without aging, the first would collect
        made.append([])
    assert collections() == before
    assert any(one is made for one in gc.get_objects(generation=2))
    gc.freeze()
    frozen = gc.get_freeze_count()
    with pytest.raises(ValueError, match="broken"), collector_off():
        raise ValueError("broken")
    assert gc.isenabled()
    assert gc.get_freeze_count() >= frozen // 2  # freed objects leave the count
    gc.disable()
    with collector_off():
        pass
    assert not gc.isenabled()


def test_the_recorded_lists_name_pages_of_their_libraries():
    lines = Path(quick_start._LISTED).read_text(encoding="ascii").splitlines()
    assert any(each.endswith("# jaxlib 0.10.2, Python 3.11") for each in lines)
    for each in lines:
        size = int(each.split()[0])
        found = list(quick_start._listed(size))
        assert 20_000_000 < sum(count for _, count in found) * PAGE_BYTES < size / 2
        assert all(first >= 0 and (first + count) * PAGE_BYTES < size for first, count in found)
        at = quick_start._PROBED_PAGE
        assert any(first <= at < first + count for first, count in found), "the page that is probed"
