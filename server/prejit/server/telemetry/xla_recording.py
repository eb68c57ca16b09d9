"""Record when each kernel of each program ran, and on which thread or stream, with XLA's own profiler.

It records XLA:CPU's thunks, which are its kernels, and on an accelerator the kernels of each stream. jax's
Python is not needed.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple, final

from prejit.runtime.device import _jax_parts
from prejit.runtime.errors import UsageError

_session_lock = threading.Lock()


class XlaEvent(NamedTuple):
    """A kernel that ran.

    Attributes:
        lane: the thread or the stream that it ran on.
        kernel: its name in the optimized HLO.
        module: name of its HLO module.
        run: number of the run of the executable.
        start, end: nanoseconds since 1970.
    """

    lane: str
    kernel: str
    module: str
    run: int
    start: int
    end: int


@final
class XlaSession:
    """A session of XLA's profiler. A process has one at a time."""

    def __init__(self) -> None:
        """Begin to record.

        Raises:
            UsageError: the process has a session already.
        """
        if not _session_lock.acquire(blocking=False):
            raise _busy("another request for one")
        try:
            self._session = _jax_parts.profiler_session()
        except Exception as error:  # of the profiler, where jax.profiler has a session
            _session_lock.release()
            raise _busy(str(error)) from error

    def stop(self) -> bytes:
        """End the session; return its XSpace, serialized."""
        try:
            found: bytes = self._session.stop()
        finally:
            _session_lock.release()
        return found


def _busy(found: str) -> UsageError:
    return UsageError(
        f"expected a process that is not profiled, found {found}",
        hint="try again when it has ended",
    )


def xla_events(xspace: bytes) -> Iterator[XlaEvent]:
    """Yield the kernels of an XSpace."""
    data = _jax_parts.read_xspace(xspace)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # jaxlib's classes have no __module__
        planes = list(data.planes)
        started = next((found for each in planes if (found := _start(each)) is not None), 0)
        for plane in planes:
            for line in plane.lines:
                lane = f"{plane.name} {line.name}".strip("/")
                for event in line.events:
                    stats: dict[str, Any] = dict(event.stats)
                    if "hlo_op" not in stats:
                        continue
                    # A float of nanoseconds since 1970 has steps of 256 ns.
                    start = started + round(event.start_ns)
                    yield XlaEvent(
                        lane,
                        str(stats["hlo_op"]),
                        str(stats.get("hlo_module", "")),
                        int(stats.get("run_id", 0)),
                        start,
                        start + round(event.duration_ns),
                    )


def _start(plane: Any) -> int | None:
    """Return when the profile began, which the times of events count from; None: another plane says it."""
    found = dict(plane.stats).get("profile_start_time")
    return None if found is None else int(found)
