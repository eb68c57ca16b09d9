"""Python's garbage collector during a start."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

from prejit.runtime.base.process_facts import is_alone, is_plain_start


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """Run imports or a load without the garbage collector: they make many objects and no garbage.

    A collector that is only turned off looks through all these objects as soon as it is on again, which takes
    5 to 15 ms before the first token. So they count as old afterwards, and the next full collection is the
    first one that looks at them. Works as a context manager and as a decorator.

    If other threads run, or the host program turned the collector off, nothing is changed.
    """
    if is_plain_start() or not is_alone() or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():  # what the host program froze must stay frozen
            gc.freeze()
            gc.unfreeze()  # into the oldest generation
        gc.enable()
