"""Golden answers that a running server asks for again: it is not ready while one is wrong."""

from __future__ import annotations

import contextlib
import threading
import time

from prejit.runtime.base.threads_and_forks import start_thread
from prejit.runtime.errors import ClosedError, PrejitError, printable
from prejit.server.served.process_upkeep import say
from prejit.server.served.served import Models, Served

_PAUSE_SECONDS = 5.0
"""The least time between two checks, however many requests fail. While an answer is wrong, the next one comes
after it."""
_PAUSE_TIMES = 20
"""A pause takes so many times as long as the check before it, which runs beside requests."""

_CLOSE_SECONDS = 2.0
"""How long a server that ends waits for a check."""


class AnswerChecks:
    """A thread that runs programs again after requests have failed, and at intervals."""

    def __init__(self, models: Models, every_seconds: float | None) -> None:
        """Start it. Without an interval, it checks only after requests have failed."""
        self._models = models
        self._every = every_seconds
        self._ends = threading.Event()
        self._thread = start_thread(self._run, "prejit-answers")

    def close(self) -> bool:
        """End the thread; return whether it has ended. The answers of large models may keep it longer."""
        self._ends.set()
        self._models.suspected.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)
        return self._thread is None or not self._thread.is_alive()

    def _run(self) -> None:
        models = self._models
        while True:
            models.suspected.wait(_PAUSE_SECONDS if models.wrong else self._every)
            models.suspected.clear()
            if self._ends.is_set():
                return
            started = time.monotonic()
            if models.state == "ready":
                for served in models:
                    if served.name in models.wrong or not served.is_sleeping:
                        self._check(served)
            seconds = time.monotonic() - started
            if self._ends.wait(max(_PAUSE_SECONDS, _PAUSE_TIMES * seconds)):
                return

    def _check(self, served: Served) -> None:
        wrong = self._models.wrong
        try:
            found = next(served.bundle.wrong_answers(), "")
            shown = found
        except ClosedError:
            return
        except PrejitError as error:  # its text may hold paths
            found, shown = str(error), f"error[{error.code}]"
        except Exception as error:  # of XLA, or no memory
            found, shown = f"{type(error).__name__}: {error}", "it cannot run"
        if not self._is_served(served):
            return  # another bundle has taken its place
        if served.is_sleeping:  # the check may have loaded programs again
            with contextlib.suppress(ClosedError):
                served.bundle.sleep()
        if shown and served.name not in wrong:
            say(printable(f"{served.name}: not ready, because a golden answer is wrong: {found}"))
        elif not shown and served.name in wrong:
            say(printable(f"{served.name}: ready again: its golden answers are right"))
        if shown:
            wrong[served.name] = shown
            if not self._is_served(served):  # removed just now: nothing would take it back
                wrong.pop(served.name, None)
        else:
            wrong.pop(served.name, None)

    def _is_served(self, served: Served) -> bool:
        return any(served.engine is one.engine for one in self._models)
