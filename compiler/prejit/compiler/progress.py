"""The progress of a build, on stderr: a live display on a terminal, plain lines elsewhere."""

from __future__ import annotations

import abc
import logging
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TextIO, cast, final

from prejit.runtime.base.wording import few

HEARTBEAT_SECONDS = 10.0
"""Longest time without a line while something runs."""


@dataclass(frozen=True, slots=True)
class Step:
    """Something that a build did, with its times in seconds since the build began.

    Attributes:
        what: as the display shows it: `lowering decode/b1-c128`.
        start, end: when it began and ended.
        program, target: what was compiled; both empty: other work.
    """

    what: str
    start: float
    end: float
    program: str = ""
    target: str = ""


def open_progress(stream: TextIO | None = None) -> Progress:
    """Return the display for a stream: live on a terminal that can redraw lines, else plain lines."""
    stream = stream or sys.stderr
    if stream is None:  # it was closed when this process started
        return Quiet()
    # Lines of a log would meet the display.
    logs = logging.getLogger("prejit").isEnabledFor(logging.INFO)
    redraws = stream.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown", "")
    return Live(stream) if redraws and not logs else Plain(stream)


def tell(text: str, stream: TextIO | None = None) -> None:
    """Write a line to a stream (None: stderr); a reader that has gone is no error."""
    stream = Unbreakable(stream or sys.stderr).as_text()
    stream.write(f"{text}\n")
    stream.flush()


@final
class Unbreakable:
    """A text stream that drops its text once writing fails: its reader has gone, or its disk is full.

    Progress must not decide whether a build succeeds.
    """

    def __init__(self, stream: TextIO | None) -> None:
        """Wrap a stream; None: a closed one, to which nothing is written."""
        self._stream = stream
        self._silent = stream is None

    def write(self, text: str) -> int:
        """Write text, or drop it."""
        self._attempt("write", text)
        return len(text)

    def flush(self) -> None:
        """Flush the stream."""
        self._attempt("flush")

    def as_text(self) -> TextIO:
        """Return this stream as a TextIO; the wrapped stream has all other methods."""
        return cast("TextIO", self)

    def _attempt(self, method: str, *arguments: str) -> None:
        if self._silent:
            return
        try:
            getattr(self._stream, method)(*arguments)
        except (OSError, ValueError):  # ValueError: the stream was closed
            self._silent = True
            with suppress(OSError, ValueError, AttributeError):
                if (found := self._stream) is sys.stdout or found is sys.stderr:
                    # Python would fail on the rest of the buffer at exit, with status 120.
                    descriptor, null = found.fileno(), os.open(os.devnull, os.O_WRONLY)
                    os.dup2(null, descriptor)
                    os.close(null)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Progress(abc.ABC):
    """Counts programs, shows them and keeps times. Any thread may call it; use it as a context manager."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._expected = self._added = self._cached = self._finished = self._failed = 0
        self._compiling: dict[str, float] = {}  # label: start time
        self._nodes: dict[str, str] = {}  # label: the node that compiles it
        self._phases: dict[str, float] = {}
        self._seconds = 0.0  # sum over the programs that are done
        self._began = _now()
        self._steps: list[Step] = []

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps that have ended so far, in the order in which they ended."""
        with self._lock:
            return tuple(self._steps)

    @property
    def seconds(self) -> float:
        """Seconds since the build began."""
        return _now() - self._began

    def expect(self, count: int) -> None:
        """Show so many programs more as the total, before they are added."""
        with self._lock:
            self._expected += count

    def add(self, count: int = 1) -> None:
        """Count programs that are compiled, or that are in the store."""
        with self._lock:
            self._added += count

    def cached(self) -> None:
        """Count a program that was in the store."""
        with self._lock:
            self._cached += 1

    def started(self, program: str, target: str, node: str = "") -> None:
        """Show that a worker compiles a program, on a node of a cluster where one is given."""
        with self._lock:
            label = _label(program, target)
            self._compiling[label] = _now()
            if node:
                self._nodes[label] = node

    def finished(self, program: str, target: str, compiler_seconds: float) -> None:
        """Show that a program was compiled.

        Args:
            program: its name.
            target: name of its target.
            compiler_seconds: time that the compiler took. `started` may have been called too late.
        """
        with self._lock:
            self._finished += 1
            node = self._nodes.get(_label(program, target))
            seconds = self._end(program, target, compiler_seconds)
            place = f" on {node}" if node else ""
            text = f"compiled {program} for {target}{place} in {seconds:.1f} s ({self._count()})"
            self._tell_finished(text)

    def failed(self, program: str, target: str, reason: str) -> None:
        """Show that a program did not compile."""
        with self._lock:
            self._failed += 1
            seconds = self._end(program, target)
            first_line = reason.partition("\n")[0]
            self._tell(
                f"failed: {program} for {target} after {seconds:.1f} s: {first_line} ({self._count()})"
            )

    @contextmanager
    def phase(self, label: str) -> Iterator[None]:
        """Show other work while it runs: `lowering decode/b1-c128`, `packing weights`."""
        start = _now()
        with self._lock:
            self._phases[label] = start
        try:
            yield
        finally:
            with self._lock:
                self._phases.pop(label, None)
                self._steps.append(Step(label, start - self._began, _now() - self._began))

    def note(self, text: str) -> None:
        """Show a line for the user."""
        with self._lock:
            self._tell(text)

    @abc.abstractmethod
    def _tell(self, text: str) -> None:
        """Show a line that stays."""

    def _tell_finished(self, text: str) -> None:  # noqa: B027 (a display may count it)
        """Show that one program is done."""

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *raised: object) -> None:
        return None

    def _end(self, program: str, target: str, least_seconds: float = 0.0) -> float:
        now, label = _now(), _label(program, target)
        start = min(self._compiling.pop(label, now), now - least_seconds)
        self._seconds += now - start
        self._steps.append(Step(label, start - self._began, now - self._began, program, target))
        self._nodes.pop(label, None)
        return now - start

    @property
    def _total(self) -> int:
        return max(self._expected, self._added)

    def _count(self) -> str:
        return f"{self._finished + self._cached + self._failed}/{self._total}"

    def _running(self) -> list[tuple[str, float]]:
        """Return what runs, longest first: label and seconds."""
        now = _now()
        since = {**self._phases, **self._compiling}
        longest_first = sorted(since, key=since.__getitem__)
        return [(label, now - since[label]) for label in longest_first]

    def _seconds_left(self) -> float:
        """Return an estimate: each of the rest takes as long as the mean of those that were compiled."""
        done = self._finished + self._failed
        if not done or not self._compiling:
            return 0.0
        now = _now()
        left = self._total - self._cached - done
        spent = sum(now - since for since in self._compiling.values())
        return max(0.0, self._seconds / done * left - spent) / len(self._compiling)


@final
class Quiet(Progress):
    """Shows nothing."""

    def _tell(self, text: str) -> None:
        pass


@final
class Plain(Progress):
    """A line for each finished program, and a heartbeat while nothing finishes."""

    def __init__(self, stream: TextIO, heartbeat_seconds: float = HEARTBEAT_SECONDS) -> None:
        super().__init__()
        self._stream = Unbreakable(stream)
        self._heartbeat_seconds = heartbeat_seconds
        self._last_line = _now()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def __enter__(self) -> Plain:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._stop.set()
        self._thread.join()

    def _tell(self, text: str) -> None:
        self._stream.write(f"{text}\n")
        self._stream.flush()
        self._last_line = _now()

    _tell_finished = _tell

    def _beat(self) -> None:
        wait = self._heartbeat_seconds
        while not self._stop.wait(wait):
            with self._lock:
                wait = self._last_line + self._heartbeat_seconds - _now()
                if wait > 0:
                    continue
                wait = self._heartbeat_seconds
                if running := self._running():
                    labels = few([f"{label} ({past:.0f} s)" for label, past in running], 4)
                    count = f"; {self._count()}" if self._total else ""
                    self._tell(f"still {labels}{count}")


@final
class Live(Progress):
    """Shows what runs, what is done and how long the rest may take, four times a second."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        # Here and not above: without a terminal nobody must wait for the import of rich.
        from rich.console import Console
        from rich.live import Live as RichLive

        self._console = Console(file=Unbreakable(stream).as_text(), highlight=False)
        self._live = RichLive(
            console=self._console,
            get_renderable=self._render,
            refresh_per_second=4,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def __enter__(self) -> Live:
        self._live.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._live.stop()

    def _tell(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def _render(self) -> Any:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        with self._lock:
            done = self._finished + self._cached + self._failed
            left = self._seconds_left()
            facts = [self._count()]
            facts += [f"{self._cached} cached"] if self._cached else []
            facts += [f"{self._failed} failed"] if self._failed else []
            facts += [f"about {left:.0f} s left"] if left >= 1 else []
            running = self._running()
            total = self._total
            nodes = Counter(self._nodes.values())
        bar = Table.grid(padding=(0, 1))
        bar.add_row(
            ProgressBar(total=max(total, 1), completed=done, width=30), Text(", ".join(facts))
        )
        lines = [Text(f"  {label} {seconds:.0f} s", style="dim") for label, seconds in running[:8]]
        if nodes:
            named = ", ".join(f"{node}: {count}" for node, count in sorted(nodes.items())[:8])
            lines.append(Text(f"  {len(nodes)} nodes ({named})", style="dim"))
        return Group(*([bar] if total else []), *lines)


def _label(program: str, target: str) -> str:
    return f"compiling {program} for {target}"


def _now() -> float:
    return time.monotonic()
