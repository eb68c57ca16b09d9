"""Sleep and wake of an engine: it holds memory while requests run, and may give it back when none does."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol, final

from prejit.runtime.errors import ClosedError
from prejit.server.engine.engine_metrics import REQUEST_BOUNDS, Histogram, SleepMetrics

_log = logging.getLogger(__name__)
POLL_SECONDS = 0.01
"""How often a request that waits for memory looks again."""
_YIELD_SECONDS = 0.25
"""How long an engine begins nothing after another one has asked for its memory; that one asks more often."""


class Room(Protocol):
    """The memory that several engines share."""

    def claim(self, sleeper: Sleeper, waited_seconds: float) -> bool:
        """Call `rise` of a sleeper if its engine fits beside those that are awake; return whether it does.

        Others may go to sleep for it, those too whose requests could run on, if it has waited for long.
        """


@final
class Sleeper:
    """Counts what runs on the memory of an engine. Safe to use from many threads.

    Whatever runs is between `begin` and `end`. Only then no caches and programs are dropped.

    Attributes:
        need_bytes: the most that the engine takes when it is awake, beside mapped weights.
        is_sleeping: whether caches and programs are dropped.
        last_used: when something ran last, by time.monotonic.
    """

    def __init__(
        self, name: str, need_bytes: int, room: Room | None, live: Callable[[], int]
    ) -> None:
        """Begin asleep if the memory is shared, and else awake.

        Args:
            name: of the bundle, for the log.
            need_bytes: see the class.
            room: what shares the memory with other engines; None: there is always enough.
            live: returns how many requests wait or run.
        """
        self._name = name
        self.need_bytes = need_bytes
        self.is_sleeping = room is not None
        self.last_used = 0.0
        self._room, self._live = room, live
        self._lock = threading.Lock()
        self._running = 0
        self._yields_until = 0.0
        self._waiting_since: float | None = None
        self._sleeps = self._wakes = 0
        self._seconds = Histogram(REQUEST_BOUNDS)
        self._is_closed = False

    def begin(self, is_over: Callable[[], bool] = lambda: False) -> None:
        """Count something that runs, as soon as there is memory for it; `is_over`: nobody waits any more.

        Raises:
            ClosedError: the engine is closed, or it is over, before there is any.
        """
        while not self.try_begin():
            if self._is_closed or is_over():
                self.give_up()
                raise ClosedError("this engine was closed before it had memory to wake up")
            time.sleep(POLL_SECONDS)

    def __enter__(self) -> None:
        if not self.try_begin():
            self.begin()

    def __exit__(self, *_: object) -> None:
        self.end()

    def try_begin(self, *, wakes: bool = True) -> bool:
        """Count something that runs, if there is memory for it now; return whether there is.

        If the engine sleeps, this wakes it, or with `wakes=False` returns False.
        """
        with self._lock:
            if self._is_closed:
                return False
            if not self.is_sleeping:
                if self._yields_until and self.yields:
                    return False
                self._running += 1
                return True
            if not wakes:
                return False
            if self._waiting_since is None:
                self._waiting_since = time.monotonic()
            waited = time.monotonic() - self._waiting_since
        if self._room is not None:  # whose lock comes before ours
            return self._room.claim(self, waited)
        self.rise()
        return True

    def give_up(self) -> None:
        """Note that nobody waits for memory any more."""
        with self._lock:
            if self.is_sleeping and not self._live():  # else others wait on
                self._waiting_since = None

    def rise(self) -> None:
        """Wake up, and count what wakes it as running."""
        with self._lock:
            if self.is_sleeping:
                _log.info("%s: wakes up", self._name)
                self._wakes += 1
            self.is_sleeping = False
            self._running += 1
            self.last_used = time.monotonic()

    def end(self) -> None:
        """Count no longer something that ran."""
        with self._lock:
            self._running -= 1
            self.last_used = time.monotonic()
        if self._waiting_since is not None:
            self.has_run()

    def has_run(self) -> None:
        """Note that the engine is awake and has run: if it slept, its wake ends now."""
        if self._waiting_since is not None:
            with self._lock:
                if self._waiting_since is not None:
                    self._seconds.observe(time.monotonic() - self._waiting_since)
                    self._waiting_since = None

    @property
    def yields(self) -> bool:
        """True if new requests wait until another engine has taken this memory."""
        return time.monotonic() < self._yields_until

    @property
    def is_idle(self) -> bool:
        """True if no request runs or waits."""
        return not self._running and not self._live()

    def sleep(self, free: Callable[[], object], *, between: bool = False) -> bool:
        """Call `free` if nothing runs, and no request waits; return whether the engine sleeps.

        `between`: requests may wait, and if some run, no others begin until they have ended.
        """
        with self._lock:
            if self.is_sleeping:
                return True
            if self._running or (not between and self._live()):
                if between:
                    self._yields_until = time.monotonic() + _YIELD_SECONDS
                return False
            self._yields_until = 0.0
            self.is_sleeping = True
            if not self._is_closed:  # a closed engine has freed its memory by itself
                free()
                self._sleeps += 1
                _log.info("%s: sleeps", self._name)
            return True

    def close(self) -> None:
        """Let nothing more begin."""
        self._is_closed = True

    def metrics(self) -> SleepMetrics:
        """Return how often the engine slept, and how long it took to wake up."""
        with self._lock:
            return SleepMetrics(
                self.is_sleeping, self._sleeps, self._wakes, self._seconds.snapshot()
            )
