"""Run the requests of a log again, by the same handlers and engines without a network, and compare."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from prejit.runtime.base.wording import did_you_mean
from prejit.runtime.errors import StoreError, UsageError
from prejit.runtime.loader import load
from prejit.server.engine.engine import Engine
from prejit.server.http.app import make_app
from prejit.server.releases.measured_checks import BundleAnswer, RequestDifference, difference_of
from prejit.server.releases.request_player import UNLIMITED, RequestPlayer, calls_of, can_play
from prejit.server.served.served import Models, Served
from prejit.server.telemetry.requestlog import Entry, log_lines, record
from prejit.server.telemetry.watched_engine import WatchedEngine

_AT_ONCE = 8
"""Requests that run at the same time: as many as an engine has slots by default."""


@dataclass(slots=True)
class Report:
    """The result of a replay.

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
    differences: list[RequestDifference] = field(default_factory=list)
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
            hint="give the whole file that `prejit serve --log` wrote, of a server that was ready",
        )
    logged = {each["name"]: each for start in starts for each in start["models"]}
    paths = _paths(log, logged, bundles)
    models = Models()
    for name, path in paths.items():
        try:
            bundle = load(path)
        except StoreError as error:
            if not os.path.exists(path):
                error.hint = f"if the bundle was moved, give its place: --bundle {name}=PATH"
            raise
        engine = cast("Engine", WatchedEngine(name, Engine(bundle, queue=UNLIMITED), record))
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


async def _run(
    log: str,
    models: Models,
    max_tokens: int | None,
    report: Report,
    progress: Callable[[str], None],
) -> None:
    player = RequestPlayer(make_app, models, max_tokens)
    room = asyncio.Semaphore(_AT_ONCE)
    done = 0

    async def one(line: dict[str, Any]) -> None:
        nonlocal done
        try:
            played = await player.play(line)
        finally:
            room.release()
        _compare(line, played.entry, report)
        done += 1
        progress(f"{done} requests, {len(report.differences)} differ")

    async with asyncio.TaskGroup() as tasks:
        for line in log_lines(log):
            if can_play(line):
                await room.acquire()  # reads the log no faster than requests run
                tasks.create_task(one(line))
            else:
                report.skipped += line.get("event") == "request"


def _compare(line: Mapping[str, Any], found: Entry, report: Report) -> None:
    """Add a request to the report."""
    old = BundleAnswer(200, tuple(calls_of(line)))
    new = BundleAnswer(found.status, tuple(found.calls))
    difference = difference_of(old, new)
    if difference.reasons:
        reason = "; ".join(difference.reasons)
        report.differences.append(
            RequestDifference(line["id"], line["path"], reason, difference.changed)
        )
    elif difference.rounded:
        report.rounded += 1
    elif difference.compared or any(call.token_ids is not None for call in old.calls):
        report.equal += 1
    else:
        report.skipped += 1
