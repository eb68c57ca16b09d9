"""Record where the time of engines goes: their requests, steps, runs of programs, and XLA's kernels.

A recording is a zip file: `xplane.pb`, which is XLA's own, and `spans.json`, which is `Spans`. Nothing is
computed from them here: a server has no time for it. `profile_time_line` reads them.
"""

from __future__ import annotations

import io
import re
import threading
import time
import zipfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, final

import msgspec

from prejit.runtime.base.process_facts import importing
from prejit.runtime.errors import ClosedError, UsageError
from prejit.server.engine.request_recorder import Observed

if TYPE_CHECKING:
    from prejit.runtime.bundle import Bundle
    from prejit.runtime.programs.watched_runs import Wrap
    from prejit.server.engine.engine import Engine

XPLANE, SPANS = "xplane.pb", "spans.json"
"""The files of a recording."""
MAX_SECONDS = 60.0
"""The longest recording. XLA keeps its events in memory: some 10 MB for a thousand tokens."""


_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([^\s%]+) = (.*)$", re.M)
_CALLED = re.compile(r'custom_call_target="([^"]*)"')
_OPERATION = re.compile(r'op_name="([^"]*)"')

Step = tuple[str, str, int, int, int]
"""Name of the model, kind of the step, its start and end in nanoseconds, its rows."""
Request = tuple[str, str, int, list[tuple[str, float]], int]
"""Name of the model, kind, end in nanoseconds, the parts before it with the seconds of each, new tokens."""


class Spans(msgspec.Struct, frozen=True):
    """The work of the engines, in times since 1970.

    Attributes:
        started_ns, ended_ns: when the recording began and ended.
        tokens: new tokens of all generations meanwhile.
        steps, requests: the steps of batches, and the requests that ended.
        runs: calls of programs: `MODEL: PROGRAM`, and when, in nanoseconds.
        kernels: by program and instruction: the native code that it calls, and jax's name of it.
    """

    started_ns: int
    ended_ns: int
    tokens: int
    steps: list[Step]
    requests: list[Request]
    runs: list[tuple[str, int]]
    kernels: dict[str, dict[str, tuple[str, str]]]


_session_lock = threading.Lock()


@final
class XlaSession:
    """A session of XLA's profiler. A process has one at a time.

    It records XLA:CPU's thunks, which are its kernels, and on an accelerator the kernels of each stream.
    jax's Python is not needed.
    """

    def __init__(self) -> None:
        """Begin to record.

        Raises:
            UsageError: the process has a session already.
        """
        with importing():
            from prejit.runtime.device import _jax_parts

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


def record(engines: Iterable[tuple[str, Bundle, Engine]], wait: Callable[[], object]) -> bytes:
    """Record engines while `wait` runs; return the recording.

    Args:
        engines: each with the name of its model and its bundle.
        wait: ends when the recording ends.

    Raises:
        UsageError: the process is being profiled already.
        ClosedError: a bundle is closed at the beginning.
    """
    each = [_Watched(model, bundle, engine) for model, bundle, engine in engines]
    session = XlaSession()
    started = time.time_ns()
    try:
        for one in each:
            one.begin()
        wait()
    finally:
        ended = time.time_ns()
        try:
            xspace = session.stop()
        finally:
            for one in each:
                one.end()
    spans = Spans(
        started,
        ended,
        sum(one.tokens for one in each),
        [step for one in each for step in one.steps],
        [request for one in each for request in one.requests],
        [run for one in each for run in one.runs],
        {name: found for one in each for name, found in one.kernels().items()},
    )
    return _zipped({XPLANE: xspace, SPANS: msgspec.json.encode(spans)})


class _Watched:
    """What an engine does while it is recorded. The attributes are those of `Spans`."""

    def __init__(self, model: str, bundle: Bundle, engine: Engine) -> None:
        self._model, self._bundle, self._engine = model, bundle, engine
        self._before = engine.metrics().generation_tokens
        self.tokens = 0
        self.steps: list[Step] = []
        self.requests: list[Request] = []
        self.runs: list[tuple[str, int]] = []
        self._watch_before: Wrap | None = None

    def begin(self) -> None:
        self._watch_before = self._bundle.watch_runs(self._noting)
        self._engine.observe(self._observe)

    def end(self) -> None:
        self._engine.observe(None)
        with suppress(ClosedError):  # another bundle has taken its place meanwhile
            self._bundle.watch_runs(self._watch_before)
            self.tokens = self._engine.metrics().generation_tokens - self._before

    def kernels(self) -> dict[str, dict[str, tuple[str, str]]]:
        """Return what the instructions of each program that ran call."""
        found = {}
        with suppress(ClosedError):
            for program in {run for run, _ in self.runs}:
                name = program.removeprefix(f"{self._model}: ")
                texts = [each.to_string() for each in self._bundle.hlo_modules(name)]
                found[program] = _kernel_names("\n".join(texts))
        return found

    def _observe(self, seen: Observed) -> None:
        now = time.time_ns()
        if seen.what == "step":
            [(part, seconds)] = seen.parts
            self.steps.append((self._model, part, now - round(seconds * 1e9), now, seen.rows))
        else:
            self.requests.append((self._model, seen.what, now, list(seen.parts), seen.rows))

    def _noting(self, name: str, run: Any) -> Any:
        runs, label = self.runs, f"{self._model}: {name}"

        def noted(arguments: Any) -> Any:
            runs.append((label, time.time_ns()))
            return run(arguments)

        return noted


def _zipped(files: dict[str, bytes]) -> bytes:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return held.getvalue()


def read_recording(content: bytes) -> tuple[bytes, Spans]:
    """Return the XSpace and the spans of a recording.

    Raises:
        ValueError: it is none.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            return archive.read(XPLANE), msgspec.json.decode(archive.read(SPANS), type=Spans)
    except (zipfile.BadZipFile, KeyError, msgspec.MsgspecError) as error:
        raise ValueError(str(error)) from error


def _kernel_names(hlo: str) -> dict[str, tuple[str, str]]:
    """Return for each instruction the native code that it calls, and jax's name of it. Both may be empty."""
    found = {}
    for name, text in _INSTRUCTION.findall(hlo):
        called, operation = _CALLED.search(text), _OPERATION.search(text)
        found[name] = (called[1] if called else "", operation[1] if operation else "")
    return found
