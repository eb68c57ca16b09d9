"""A thread that the interpreter stops inside XLA aborts the process."""

import subprocess
import sys
import threading

import pytest

from prejit.runtime.base.threads_and_forks import start_thread

EXITS_AT_ONCE = """
import threading, time
from prejit.runtime.base.threads_and_forks import start_thread

def work():
    time.sleep(0.2)
    print("finished", flush=True)

daemon = threading.Thread(target=lambda: start_thread(work, "work"), daemon=True)
daemon.start()
daemon.join()
"""

STARTS_TOO_LATE = """
import atexit
from prejit.runtime.base.threads_and_forks import start_thread

atexit.register(lambda: print(start_thread(lambda: None, "late"), flush=True))
"""


def run(program: str) -> str:
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    return found.stdout.strip()


def test_threads_are_waited_for_and_none_starts_too_late() -> None:
    assert run(EXITS_AT_ONCE) == "finished"
    assert run(STARTS_TOO_LATE) == "None"
    names: list[str] = []
    thread = start_thread(lambda: names.append(threading.current_thread().name), "named")
    assert thread is not None
    thread.join()
    assert names == ["named"]


def test_no_thread_starts_where_the_system_allows_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert start_thread(lambda: None, "refused") is None
