"""Wait until something is so: no test depends on how fast the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_for(holds: Callable[[], object], seconds: float = 60.0, what: str = "") -> None:
    """Return once a function returns something true; fail if it does not within the time."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, what or f"waited for {seconds:g} s"
        time.sleep(0.01)
