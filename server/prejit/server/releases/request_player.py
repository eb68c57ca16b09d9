"""Play a request again: through the same handlers and engines, without a network."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import msgspec

from prejit.server.gate.api_keys import ApiKey
from prejit.server.gate.server_settings import Settings
from prejit.server.served.served import Models
from prejit.server.telemetry.requestlog import Entry, RecordedCall, body_of, current

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message

UNLIMITED = 1 << 40
"""A limit that no request reaches: what was recorded was allowed."""
AppOf = Callable[[Models, Settings], "ASGIApp"]
"""Makes the application of a server."""

_SAID = {"text", "content", "reasoning_content", "arguments", "refusal", "delta"}
"""The members of answers that hold what a model said."""


@dataclass(frozen=True, slots=True)
class PlayedRequest:
    """The answer to a request.

    Attributes:
        entry: its record: status, and the calls of engines with what they gave.
        seconds: time from the request to the end of its answer.
        cpu_seconds: CPU time of this process meanwhile, of all its threads.
        answer: the bytes of the answer.
    """

    entry: Entry
    seconds: float
    cpu_seconds: float
    answer: bytes

    @property
    def said(self) -> str:
        """The text of the answer, whether it was streamed or not."""
        found: list[str] = []
        for line in self.answer.splitlines():
            _collect(_json(line.removeprefix(b"data: ")), found)
        return "".join(found)


@final
class _CapturedEntries:
    """Takes the records of requests that run again."""

    def __init__(self) -> None:
        self._given: dict[str, list[int | None]] = {}
        self._entries: dict[str, Entry] = {}

    def expect(self, number: str, seeds: list[int | None]) -> None:
        """Give the calls of a request these seeds."""
        self._given[number] = seeds

    def begin(self, entry: Entry) -> None:
        """Take what engines give this task from now on as results of this request."""
        entry.seeds = self._given.pop(entry.id)
        current.set(entry)

    def end(self, entry: Entry) -> None:
        """Take the record of a finished request."""
        self._entries[entry.id] = entry

    def take(self, number: str) -> Entry:
        """Return the record of a finished request."""
        return self._entries.pop(number)


@final
class RequestPlayer:
    """Plays requests of a log to served bundles. Use it in one event loop."""

    def __init__(self, app_of: AppOf, models: Models, max_tokens: int | None = None) -> None:
        """Play them to these bundles, whose engines are watched by `record`.

        Args:
            app_of: makes the application.
            models: the bundles.
            max_tokens: the limit of new tokens of the server that wrote the log.
        """
        self._captured = _CapturedEntries()
        settings = Settings(
            body_bytes=UNLIMITED,
            max_tokens=max_tokens,
            timeout_seconds=float(UNLIMITED),
            clients=UNLIMITED,
            anybody=ApiKey(priorities=(-UNLIMITED, UNLIMITED)),
            log=self._captured,
        )
        self._app = app_of(models, settings)
        self._count = 0

    async def play(self, line: Mapping[str, Any]) -> PlayedRequest:
        """Run the request of a line of a log again, with the seeds that it had."""
        self._count += 1
        number = str(self._count)
        self._captured.expect(number, [call.seed for call in calls_of(line)])
        began, used = time.perf_counter(), time.process_time()
        answer = await _answer(self._app, number, line)
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - used
        return PlayedRequest(self._captured.take(number), seconds, cpu_seconds, answer)


def calls_of(line: Mapping[str, Any]) -> list[RecordedCall]:
    """Return the calls of engines that a line has."""
    return [msgspec.convert(each, RecordedCall) for each in line["calls"]]


def can_play(line: Mapping[str, Any]) -> bool:
    """Return whether a line of a log is a request that gave something to compare."""
    return line.get("event") == "request" and line["status"] == 200 and bool(line["calls"])


async def _answer(app: ASGIApp, number: str, line: Mapping[str, Any]) -> bytes:
    """Send a logged request to the application, and return the body of its answer."""
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
    parts: list[bytes] = []

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()  # the client stays until the end
        raise AssertionError

    async def send(message: Message) -> None:
        parts.append(message.get("body", b""))

    await app(scope, receive, send)
    return b"".join(parts)


def _json(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _collect(value: Any, found: list[str]) -> None:
    """Append the texts that a model said, in their order."""
    if isinstance(value, list):
        for each in value:
            _collect(each, found)
    elif isinstance(value, dict):
        for name, each in value.items():
            if name in _SAID and isinstance(each, str):
                found.append(each)
            else:
                _collect(each, found)
