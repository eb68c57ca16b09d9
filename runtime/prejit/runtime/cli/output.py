"""The output of commands: data on stdout, everything else on stderr."""

from __future__ import annotations

import contextlib
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from prejit.runtime.base.files import store_errors
from prejit.runtime.errors import PrejitWarning, printable

if TYPE_CHECKING:
    from prejit.runtime.start_report import StartReport

_PROGRESS_SECONDS = 5
"""Where stderr is not a terminal, a line of progress appears at most this often."""


def print_text(text: str = "", *, file: TextIO | None = None) -> None:
    """Print text for people. Control characters are escaped: names in it may come from a bundle.

    What stderr does not take, because its disk is full or its reader has gone, is dropped.
    """
    is_note = file is not None and file is sys.stderr
    with contextlib.suppress(OSError) if is_note else contextlib.nullcontext():
        print(printable(text), file=file, flush=is_note)


def print_json(value: Any) -> None:
    """Print a value as JSON on stdout."""
    print(json.dumps(value, indent=2))


def print_start(start: StartReport) -> None:
    """Print the parts of a start in one line on stderr, and its hints."""
    parts = {
        "process": start.process_seconds,
        "imports": start.imports_seconds,
        "reading": start.reading_seconds,
        "verifying": start.verifying_seconds,
        "loading": start.loading_seconds,
        "first run": start.first_run_seconds,
        "other": start.other_seconds,
    }
    shown = ", ".join(f"{name} {seconds * 1e3:.0f}" for name, seconds in parts.items())
    verity = f"; fs-verity for {start.verity_bytes / 1e6:.1f} MB" if start.verity_bytes else ""
    print_text(
        f"start {start.total_seconds * 1e3:.0f} ms: {shown}\n"
        f"verified {start.hashed_bytes / 1e6:.1f} MB; receipts for {start.receipt_bytes / 1e6:.1f} MB"
        f"{verity}",
        file=sys.stderr,
    )
    for hint in start.hints:
        print_text(f"hint: {hint}", file=sys.stderr)


def write_text(path: str, text: str) -> None:
    """Write a file that an option names.

    Raises:
        StoreError: the file cannot be written.
    """
    with store_errors(path, "write"):
        Path(path).write_bytes(text.encode("utf-8", "backslashreplace"))


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Give a function that shows one line of progress on stderr.

    On a terminal each line replaces the one before it, and an empty one ends it; elsewhere a line is printed
    every few seconds.
    """
    terminal = sys.stderr is not None and sys.stderr.isatty()
    shown = float("-inf")

    def show(line: str) -> None:
        nonlocal shown
        if terminal:
            print(f"\r\x1b[K{printable(line[:79])}", end="", file=sys.stderr, flush=True)
        elif line and time.monotonic() - shown > _PROGRESS_SECONDS:
            shown = time.monotonic()
            print_text(line, file=sys.stderr)

    try:
        yield show
    finally:
        if terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


@contextlib.contextmanager
def warnings_on_stderr() -> Iterator[None]:
    """Print prejit's warnings as one line each on stderr."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", PrejitWarning)  # whatever PYTHONWARNINGS says
        warnings.showwarning = lambda message, *_, **__: print_text(
            f"warning: {message}", file=sys.stderr
        )
        yield
