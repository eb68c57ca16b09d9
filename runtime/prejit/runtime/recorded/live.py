"""Tell of misses while the program runs, for servers that end seldom."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from prejit.runtime.machine.fingerprint import Fingerprint
from prejit.runtime.recorded.hook_events import read_events
from prejit.runtime.recorded.recorded_bundle import RecordedBundle
from prejit.runtime.recorded.run_report import Miss, explained, report_of

_PAUSE_SECONDS = 0.5


@contextmanager
def telling(
    directory: Path, bundle: RecordedBundle, machine: Fingerprint, tell: Callable[[str], None]
) -> Iterator[None]:
    """Explain each miss soon after it happened, as the report at the end does, while the block runs.

    Args:
        directory: where the processes of the program write their events.
        bundle: the bundle that they got.
        machine: this machine.
        tell: takes a paragraph for each miss, in a thread of its own.
    """
    told: set[Miss] = set()
    known = 0
    over = threading.Event()

    def tell_new() -> None:
        nonlocal known
        size = sum(path.stat().st_size for path in directory.glob("*.jsonl"))
        if size == known:
            return
        known = size
        misses = report_of(bundle, read_events(directory), machine).misses
        for paragraph in explained([miss for miss in misses if miss not in told]):
            tell(paragraph)
        told.update(misses)

    def follow() -> None:
        while not over.wait(_PAUSE_SECONDS):
            tell_new()

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        tell_new()
