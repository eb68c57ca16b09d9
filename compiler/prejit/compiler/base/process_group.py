"""The processes that a child started, which end with it."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from contextlib import suppress
from typing import Any, final


@final
class ProcessGroup:
    """A child process that leads a session of its own, with all that it starts."""

    def __init__(self, leader: subprocess.Popen[Any]) -> None:
        """Take a process that was started with `start_new_session=True`."""
        self._leader = leader
        self._lock = threading.Lock()
        self._killed = False

    @property
    def alive(self) -> bool:
        """Return whether the leader runs and nobody has killed the group."""
        return not self._killed and self._leader.poll() is None

    def kill(self) -> None:
        """Kill all of them now. Safe from any thread, and again: the group's number may be another's then."""
        with self._lock:
            if not self._killed:
                self._killed = True
                with suppress(ProcessLookupError):
                    os.killpg(self._leader.pid, signal.SIGKILL)

    def release(self) -> None:
        """Kill all of them, wait for the leader, and close its pipes: in the thread that uses these."""
        self.kill()
        with suppress(OSError), self._leader:  # closes the pipes and waits
            pass
