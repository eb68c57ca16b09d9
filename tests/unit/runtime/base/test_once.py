"""A property that several threads ask for first is computed once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from prejit.runtime.base.threads_and_forks import once


class Slow:
    def __init__(self) -> None:
        self.made = list[str]()
        self.together = threading.Barrier(8)

    @once
    def value(self) -> object:
        """What it is."""
        self.made.append("value")
        assert self.other is self.other
        threading.Event().wait(0.05)
        return object()

    @once
    def other(self) -> object:
        self.made.append("other")
        return object()

    @once
    def failing(self) -> object:
        self.made.append("failing")
        raise KeyError

    def ask(self, _: int) -> object:
        self.together.wait()
        return self.value


def test_threads_get_the_one_that_was_made_and_failures_are_tried_again() -> None:
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
