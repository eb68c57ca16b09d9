"""Record where the time of engines goes: their requests, steps, runs of programs, and XLA's kernels.

A recording is a zip file: `xplane.pb`, which is XLA's own, and `spans.json`, which is `Spans`. Nothing is
computed from them here: a server has no time for it. `profile_time_line` reads them.
"""

from __future__ import annotations

import io
import time
import zipfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from prejit.runtime.base.process_facts import importing
from prejit.runtime.errors import ClosedError
from prejit.server.engine.request_recorder import Observed

if TYPE_CHECKING:
    from prejit.runtime.bundle import Bundle
    from prejit.server.engine.engine import Engine

XPLANE, SPANS = "xplane.pb", "spans.json"
"""The files of a recording."""
MAX_SECONDS = 60.0
"""The longest recording. XLA keeps its events in memory: some 10 MB for a thousand tokens."""


class Spans(msgspec.Struct, frozen=True):
    """What the engines did, in times since 1970.

    Attributes:
        started_ns, ended_ns: when the recording began and ended.
        tokens: new tokens of all generations meanwhile.
        steps: steps of a batch: name of the model, kind, start and end in nanoseconds, rows.
        requests: requests that ended: name of the model, kind, end in nanoseconds, the parts before it with
            the seconds of each, and new tokens.
        runs: calls of programs: name of the program, and when, in nanoseconds.
        kernels: by program and instruction: the native code that it calls, and jax's name of it.
    """

    started_ns: int
    ended_ns: int
    tokens: int
    steps: list[tuple[str, str, int, int, int]]
    requests: list[tuple[str, str, int, list[tuple[str, float]], int]]
    runs: list[tuple[str, int]]
    kernels: dict[str, dict[str, tuple[str, str]]]


def record(engines: Iterable[tuple[str, Bundle, Engine]], wait: Callable[[], object]) -> bytes:
    """Record engines while `wait` runs; return the recording.

    Args:
        engines: each with the name of its model and its bundle.
        wait: ends when the recording ends.

    Raises:
        UsageError: the process is being profiled already.
        ClosedError: a bundle is closed at the beginning.
    """
    with importing():
        from prejit.runtime.device.xla_profile import XlaSession

    steps: list[tuple[str, str, int, int, int]] = []
    requests: list[tuple[str, str, int, list[tuple[str, float]], int]] = []
    runs: list[tuple[str, int]] = []
    kernels: dict[str, dict[str, tuple[str, str]]] = {}
    each = list(engines)

    def observer(model: str) -> Callable[[Observed], None]:
        def observe(seen: Observed) -> None:
            now = time.time_ns()
            if seen.what == "step":
                [(part, seconds)] = seen.parts
                steps.append((model, part, now - round(seconds * 1e9), now, seen.rows))
            else:
                requests.append((model, seen.what, now, list(seen.parts), seen.rows))

        return observe

    def noting(name: str, run: Any) -> Any:
        def noted(arguments: Any) -> Any:
            runs.append((name, time.time_ns()))
            return run(arguments)

        return noted

    before = _tokens(each)
    session = XlaSession()
    started = time.time_ns()
    try:
        for model, bundle, engine in each:
            bundle.watch_runs(noting)
            engine.observe(observer(model))
        wait()
    finally:
        ended, tokens = time.time_ns(), _tokens(each) - before
        try:
            xspace = session.stop()
        finally:
            for _, bundle, engine in each:
                engine.observe(None)
                with suppress(ClosedError):
                    bundle.watch_runs(None)
    ran = {name for name, _ in runs}
    for _, bundle, _ in each:
        with suppress(ClosedError):  # another bundle has taken its place meanwhile
            for name in ran & {report.program for report in bundle.report()}:
                kernels[name] = bundle.kernel_names(name)
    spans = Spans(started, ended, tokens, steps, requests, runs, kernels)
    return _zipped({XPLANE: xspace, SPANS: msgspec.json.encode(spans)})


def _tokens(engines: Iterable[tuple[str, Bundle, Engine]]) -> int:
    return sum(engine.metrics().generation_tokens for _, _, engine in engines)


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
