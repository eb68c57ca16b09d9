"""A child process ends with all that it started, and a wait for it ends, too."""

import signal
import sys
import time

import pytest

from prejit.runtime.base.child_process import Child, run_child

_PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; print(1, flush=True); time.sleep(600)"])
time.sleep(600)
"""


def python(code):
    return [sys.executable, "-c", code]


def test_a_kill_ends_what_it_started_and_nobody_else(monkeypatch):
    child = Child(python(_PARENT))
    assert child.answer() == 1  # of the second process
    assert child.alive
    child.kill()
    assert not child.alive
    assert child.answer() is None  # both have closed it
    assert child.exit_code() == -signal.SIGKILL
    child.release()
    # When the process has been waited for, its number may be that of another one.
    child = Child(python(_PARENT))
    child.release()
    monkeypatch.setattr("os.killpg", lambda *_: pytest.fail("killed again"))
    child.kill()
    child.release()


_LEAVES_ONE = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("done")
print("last words", file=sys.stderr)
sys.exit(3)
"""


def test_a_process_left_behind_or_late_delays_no_result():
    """It has the same stdout and stderr: a pipe would stay open until the time limit."""
    started = time.monotonic()
    code, output, errors = run_child(python(_LEAVES_ONE), seconds=300)
    assert (code, output, errors) == (3, b"done\n", "last words\n")
    assert time.monotonic() - started < 250
    # The second process ignores the end of the first one.
    code, output, _ = run_child(python(f"print(1, flush=True)\n{_PARENT}"), seconds=5)
    assert code is None
    assert output.startswith(b"1\n")


def test_answers_are_whole_lines_within_a_time_limit():
    large = "x" * (1 << 20)
    for written in ('print("{\\"a\\": 1}", end="")', 'print("no JSON")', "pass"):
        with Child(python(f"import sys; sys.stdin.readline(); {written}; sys.exit(7)")) as child:
            assert child.ask({"large": large}) is None
            assert (child.exit_code(60), child.alive) == (7, False)
            assert child.ask({}) is None  # it is gone
    with Child(python("import time; time.sleep(600)")) as child:
        assert child.ask(large, 0.2) is None
        assert (child.late, child.exit_code()) == (True, -signal.SIGKILL)
    code = "import sys\nfor line in sys.stdin: print(line, end='', file=sys.stderr); print(1)"
    with Child([sys.executable, "-u", "-c", code], errors="kept") as child:
        for number in (1, 2):
            assert (child.ask(number), child.errors()) == (1, f"{number}\n")
