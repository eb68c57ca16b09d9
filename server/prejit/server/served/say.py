"""Messages of a server to the person who started it. It goes on when nobody reads them any more."""

from __future__ import annotations

import contextlib
import os
import sys

from prejit.runtime.ship.reference import without_login


def say(text: str) -> None:
    """Print a text to stderr; forget it if its reader is gone or the disk is full."""
    try:
        print(without_login(text), file=sys.stderr, flush=True)
    except BrokenPipeError:
        # The text stays in Python's buffer, whose flush at the end would fail and change the exit status.
        with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stderr.fileno())
    except OSError:
        pass
