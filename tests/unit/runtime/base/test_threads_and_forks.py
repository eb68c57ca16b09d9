"""Threads that the interpreter waits for, and properties that several threads ask for at once."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from prejit.runtime.base.threads_and_forks import once, start_thread

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


def test_threads_are_waited_for_and_none_starts_too_late(monkeypatch, run_python):
    assert run_python(EXITS_AT_ONCE).stdout == "finished\n"
    assert run_python(STARTS_TOO_LATE).stdout == "None\n"
    names = []
    thread = start_thread(lambda: names.append(threading.current_thread().name), "named")
    thread.join()
    assert names == ["named"]

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert start_thread(lambda: None, "refused") is None


class Slow:
    def __init__(self):
        self.made = list[str]()
        self.together = threading.Barrier(8)

    @once
    def value(self):
        """What it is."""
        self.made.append("value")
        assert self.other is self.other
        threading.Event().wait(0.05)
        return object()

    @once
    def other(self):
        self.made.append("other")
        return object()

    @once
    def failing(self):
        self.made.append("failing")
        raise KeyError

    def ask(self, _):
        self.together.wait()
        return self.value


def test_threads_get_the_one_that_was_made_and_failures_are_tried_again():
    slow = Slow()
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(slow.ask, range(8)))
    assert len(set(map(id, found))) == 1
    assert slow.made == ["value", "other"]
    assert Slow().value is not slow.value
    slow = Slow()
    for _ in range(2):
        with pytest.raises(KeyError):
            slow.failing  # noqa: B018
    assert slow.made == ["failing", "failing"]
