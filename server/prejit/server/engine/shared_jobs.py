"""Calls of several callers whose rows may share runs of a program."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from prejit.runtime.base import arguments
from prejit.runtime.errors import DeadlineError, QueueFullError
from prejit.server.engine.fair_queue import NO_LIMITS, Limits
from prejit.server.engine.request_recorder import ONE_RUN, Cost

_P = TypeVar("_P")


@dataclass(slots=True, eq=False)
class SharedJob(Generic[_P]):
    """The rows of one call, which may take part in several runs.

    Attributes:
        payload: what the lane's function needs of the call.
        rows: how many rows the call has.
        most: the most rows that a run with this call takes; 0: its rows run together, and alone.
        key: calls with equal keys may share a run.
        finish: makes the result of the call of what its shares returned, in the order of the rows.
        deadline: when it must have its result, by time.monotonic; None: any time.
        client: clients get fair shares of rows.
        limits: how many calls of the client may wait and take part in a run.
        future: gets the result.
        submitted: when it was submitted, by time.monotonic.
        began: when its first run began; 0: none has.
        taken: how many rows runs have taken.
        returned: what its shares returned.
        waited_for_compile: whether one of its runs waited for the compilation of a program.
        is_counted: whether metrics have its end.
    """

    payload: _P
    rows: int
    most: int
    key: Hashable
    finish: Callable[[Sequence[Any]], Any]
    deadline: float | None = None
    client: str = ""
    limits: Limits = NO_LIMITS
    future: Future[Any] = field(default_factory=Future)
    submitted: float = field(default_factory=time.monotonic)
    began: float = 0.0
    taken: int = 0
    returned: list[Any] = field(default_factory=list)
    waited_for_compile: bool = False
    is_counted: bool = False

    def is_over(self, now: float) -> bool:
        """Return whether the caller no longer waits: it has cancelled, or its deadline has passed."""
        if self.deadline is not None and now >= self.deadline:
            self.fail(overdue())
        return self.future.done()

    def fail(self, error: BaseException) -> None:
        """Raise an error to the caller, unless the caller has cancelled."""
        with contextlib.suppress(InvalidStateError):
            self.future.set_exception(error)


class Share(NamedTuple, Generic[_P]):
    """The rows `start` to `end` of a job, for one run."""

    job: SharedJob[_P]
    start: int
    end: int

    @property
    def rows(self) -> int:
        """How many rows it has."""
        return self.end - self.start


class Ran(NamedTuple):
    """The results of one run of a program.

    Attributes:
        returned: one result for each share.
        cost: what it cost.
    """

    returned: Sequence[Any]
    cost: Cost = ONE_RUN


def are_over(shares: Sequence[Share[Any]]) -> bool:
    """Return whether no caller of these shares waits any more."""
    now = time.monotonic()
    return all([share.job.is_over(now) for share in shares])


def deadline_after(timeout: float | None) -> float | None:
    """Return the time.monotonic at which a timeout in seconds ends; None: never.

    Raises:
        UsageError: it is no positive number.
    """
    if timeout is None:
        return None
    return time.monotonic() + arguments.number("timeout", timeout, "more than 0", lambda s: s > 0)


def reason_of(error: BaseException) -> str:
    """Return the reason, as metrics have it, for which a request with this error ended."""
    if isinstance(error, DeadlineError):
        return "deadline"
    if isinstance(error, QueueFullError):
        return "refused"
    # No Exception: ctrl-C, or a task that was cancelled.
    return "error" if isinstance(error, Exception) else "cancelled"


def overdue() -> DeadlineError:
    """Return the error of a call whose deadline has passed."""
    return DeadlineError(
        "expected a result within the timeout, found the call still waiting or running",
        hint="give a longer timeout, or send fewer calls at once",
    )
