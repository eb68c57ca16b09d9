"""The requests that run now, so that a swap knows when nobody uses what it has replaced."""

from __future__ import annotations

import threading
from collections import Counter
from typing import final


@final
class RunningRequests:
    """Counts the requests that run, by the epoch in which each began.

    A request belongs to the epoch in which it begins. What was replaced before the end of an epoch is used by
    the requests of that epoch and of earlier ones alone (the grace period of read-copy-update).
    """

    def __init__(self) -> None:
        """Begin with the first epoch."""
        self._changed = threading.Condition()
        self._epoch = 0
        self._running: Counter[int] = Counter()

    def begin(self) -> int:
        """Count a request; return its epoch."""
        with self._changed:
            self._running[self._epoch] += 1
            return self._epoch

    def end(self, epoch: int) -> None:
        """Count no longer a request of an epoch."""
        with self._changed:
            self._running[epoch] -= 1
            if not self._running[epoch]:
                del self._running[epoch]
                self._changed.notify_all()

    def wait_for_earlier(self, seconds: float) -> bool:
        """End the epoch, and wait for all requests that have begun; return whether they ended in time."""
        with self._changed:
            self._epoch += 1
            before = self._epoch
            return self._changed.wait_for(
                lambda: min(self._running, default=before) >= before, seconds
            )
