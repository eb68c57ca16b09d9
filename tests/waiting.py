"""Wait until something is so: no test depends on how fast the machine is."""

import time


def wait_for(holds, seconds=60.0, what=""):
    """Return once a function returns something true; fail if it does not within the time."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, what or f"waited for {seconds:g} s"
        time.sleep(0.01)
