"""Run the requests of a log again, by the same handlers and engines without a network, and compare."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast, final

import msgspec

from prejit.runtime.base.wording import did_you_mean
from prejit.runtime.errors import UsageError
from prejit.runtime.loader import load
from prejit.server.engine.engine import Engine
from prejit.server.gate.api_keys import ApiKey
from prejit.server.gate.server_settings import Settings
from prejit.server.http.app import make_app
from prejit.server.served.served import Models, Served
from prejit.server.telemetry.requestlog import (
    Entry,
    RecordedCall,
    body_of,
    current,
    log_lines,
    record,
)
from prejit.server.telemetry.watched_engine import WatchedEngine

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message


_AT_ONCE = 8
"""Requests that run at the same time: as many as an engine has slots by default."""
_ROUNDING = 1e-3
"""How much norms may differ, relatively, where the order of sums depends on the bucket."""
_UNLIMITED = 1 << 40


@dataclass(frozen=True, slots=True)
class ReplayDifference:
    """A request that gave something else than the log has.

    Attributes:
        id: of the request in the log.
        path: its path.
        reason: what was expected and what was found.
    """

    id: str
    path: str
    reason: str


@dataclass(slots=True)
class Report:
    """What a replay found.

    Attributes:
        equal: how many requests gave the same tokens, or the same bytes.
        rounded: how many gave arrays that differ by rounding only.
        skipped: how many were not run: they had failed, or gave nothing to compare.
        differences: the others.
        notes: what may explain them.
    """

    equal: int = 0
    rounded: int = 0
    skipped: int = 0
    differences: list[ReplayDifference] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def replay(
    log: str, bundles: Sequence[tuple[str | None, str]], progress: Callable[[str], None]
) -> Report:
    """Run the requests of a log again.

    Args:
        log: path of the file.
        bundles: paths that replace those of the log, with the name of the model, or None if it has only one.
        progress: takes a line about what was done so far.

    Raises:
        StoreError: the log cannot be read.
        UsageError: it has no start of a server, or no model of a name in `bundles`.
        MismatchError, RejectError: as `load`.
    """
    report = Report()
    starts = [line for line in log_lines(log, report.notes) if line.get("event") == "start"]
    if not starts:
        raise UsageError(
            f"{log}: expected a line that says which bundles were served, found none",
            hint="give the whole file that `prejit serve --log` wrote",
        )
    logged = {each["name"]: each for start in starts for each in start["models"]}
    paths = _paths(log, logged, bundles)
    models = Models()
    for name, path in paths.items():
        bundle = load(path)
        engine = cast("Engine", WatchedEngine(name, Engine(bundle, queue=_UNLIMITED), record))
        models.add(Served(name, bundle, engine, int(time.time())))
        served = [
            each["digest"] for start in starts for each in start["models"] if each["name"] == name
        ]
        if {*served} != {bundle.digest}:
            was = ", then ".join(dict.fromkeys(served))
            report.notes.append(f"{name}: the log is of {was}, and {path} is {bundle.digest}")
    models.change("loading", "ready")
    try:
        asyncio.run(_run(log, models, starts[-1].get("max_tokens"), report, progress))
    finally:
        models.close()
    return report


def _paths(
    log: str, logged: Mapping[str, Any], bundles: Sequence[tuple[str | None, str]]
) -> dict[str, str]:
    """Return where the bundle of each model lies."""
    paths = {name: str(each["path"]) for name, each in logged.items()}
    for given, path in bundles:
        name = given
        if name is None:
            if len(paths) != 1:
                raise UsageError(
                    f"--bundle: expected NAME=PATH, because {log} has {', '.join(paths)}; found {path!r}"
                )
            name = next(iter(paths))
        if name not in paths:
            raise UsageError(
                f"--bundle: expected one of {', '.join(paths)}, found {name!r}"
                + did_you_mean(name, paths)
            )
        paths[name] = path
    return paths


@final
class _Captured:
    """Takes the records of requests that run again."""

    def __init__(self) -> None:
        self._seeds: dict[str, list[int | None]] = {}
        self._entries: dict[str, Entry] = {}

    def expect(self, number: str, seeds: list[int | None]) -> None:
        """Give the calls of a request these seeds."""
        self._seeds[number] = seeds

    def begin(self, entry: Entry) -> None:
        """Take what engines give this task from now on as results of this request."""
        entry.seeds = self._seeds.pop(entry.id)
        current.set(entry)

    def end(self, entry: Entry) -> None:
        """Take the record of a finished request."""
        self._entries[entry.id] = entry

    def take(self, number: str) -> Entry:
        """Return the record of a finished request."""
        return self._entries.pop(number)


async def _run(
    log: str,
    models: Models,
    max_tokens: int | None,
    report: Report,
    progress: Callable[[str], None],
) -> None:
    captured = _Captured()
    settings = Settings(
        body_bytes=_UNLIMITED,
        max_tokens=max_tokens,
        timeout_seconds=float(_UNLIMITED),
        clients=_UNLIMITED,
        anybody=ApiKey(priorities=(-_UNLIMITED, _UNLIMITED)),  # what was recorded was allowed
        log=captured,
    )
    app = make_app(models, settings)
    room = asyncio.Semaphore(_AT_ONCE)
    done = 0

    async def one(number: int, line: dict[str, Any]) -> None:
        nonlocal done
        calls = [msgspec.convert(_known(each), RecordedCall) for each in line["calls"]]
        captured.expect(str(number), [call.seed for call in calls])
        try:
            await _request(app, str(number), line)
        finally:
            room.release()
        entry = captured.take(str(number))
        _compare(line, calls, entry, report)
        done += 1
        progress(f"{done} requests, {len(report.differences)} differ")

    async with asyncio.TaskGroup() as tasks:
        for number, line in enumerate(log_lines(log)):
            if line.get("event") != "request":
                continue
            if line["status"] != 200 or not line["calls"]:
                report.skipped += 1
                continue
            await room.acquire()  # reads the log no faster than requests run
            tasks.create_task(one(number, line))


def _known(call: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in call.items() if name in RecordedCall.__slots__}


async def _request(app: ASGIApp, number: str, line: Mapping[str, Any]) -> None:
    """Send a logged request to the application, and drop the response: engines are what is compared."""
    headers = {**line["headers"], "x-request-id": number}
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": line["method"],
        "path": line["path"],
        "raw_path": line["path"].encode(),
        "root_path": "",
        "query_string": b"",
        "scheme": "http",
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in headers.items()],
        "server": None,
        "client": None,
    }
    messages = [{"type": "http.request", "body": body_of(line), "more_body": False}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()  # the client stays until the end
        raise AssertionError

    async def send(message: Message) -> None:
        pass

    await app(scope, receive, send)


def _compare(
    line: Mapping[str, Any], expected: Sequence[RecordedCall], entry: Entry, report: Report
) -> None:
    """Add a request to the report."""
    reasons: list[str] = []
    rounded = compared = False
    if entry.status != 200:
        reasons.append(f"expected status 200, found {entry.status}")
    elif len(entry.calls) != len(expected):
        reasons.append(f"expected {len(expected)} calls of engines, found {len(entry.calls)}")
    else:
        for was, now in zip(expected, entry.calls, strict=True):
            if was.token_ids is None and was.arrays is None:
                continue  # it was cancelled before it gave anything
            compared = True
            if was.arrays is not None:
                reason, by_rounding = _array_difference(was.arrays, now.arrays or {})
                rounded = rounded or by_rounding
            else:
                reason = _token_difference(was, now)
            if reason:
                reasons.append(reason)
    if reasons:
        report.differences.append(ReplayDifference(line["id"], line["path"], "; ".join(reasons)))
    elif rounded:
        report.rounded += 1
    elif compared:
        report.equal += 1
    else:
        report.skipped += 1


def _token_difference(was: RecordedCall, now: RecordedCall) -> str:
    """Return how the tokens differ; empty: they do not. A request that was cut short has the first ones."""
    old, new = was.token_ids or [], now.token_ids or []
    if not was.finish_reason:
        new = new[: len(old)]
    if old == new and was.finish_reason in ("", now.finish_reason):
        return ""
    if old == new:
        return f"expected finish_reason {was.finish_reason!r}, found {now.finish_reason!r}"
    place = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), None)
    if place is None:
        return f"expected {len(old)} tokens, found {len(new)}"
    return f"token {place}: expected {old[place]}, found {new[place]}"


def _array_difference(was: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, bool]:
    """Return how arrays differ, and whether they differ by rounding at least."""
    if was.keys() != now.keys():
        return f"expected the arrays {', '.join(was)}, found {', '.join(now) or 'none'}", False
    rounded = False
    for name, old in was.items():
        new = now[name]
        if (old["dtype"], old["shape"]) != (new["dtype"], new["shape"]):
            described = (f"{each['dtype']}{each['shape']}" for each in (old, new))
            return "{}: expected {}, found {}".format(name, *described), False
        if old["digest"] == new["digest"]:
            continue
        norms = old.get("norm", math.nan), new.get("norm", math.nan)
        if not math.isclose(*norms, rel_tol=_ROUNDING):
            return f"{name}: expected other values: norm {norms[0]}, found {norms[1]}", False
        rounded = True
    return "", rounded
