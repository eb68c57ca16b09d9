"""The requests of a gate, a canary or a log: how they are played again, and seeded ones of their own."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import msgspec
import numpy as np

from prejit.server.gate.api_keys import ApiKey
from prejit.server.gate.server_settings import Settings
from prejit.server.served.served import Models, Served
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
class RequestPlayer:
    """Plays requests of a log to served bundles. Use it in one event loop."""

    def __init__(self, app_of: AppOf, models: Models, max_tokens: int | None = None) -> None:
        """Play them to these bundles, whose engines are watched by `record`.

        Args:
            app_of: makes the application.
            models: the bundles.
            max_tokens: the limit of new tokens of the server that wrote the log.
        """
        self._seeds: dict[str, list[int | None]] = {}
        self._entries: dict[str, Entry] = {}
        settings = Settings(
            body_bytes=UNLIMITED,
            max_tokens=max_tokens,
            timeout_seconds=float(UNLIMITED),
            clients=UNLIMITED,
            anybody=ApiKey(priorities=(-UNLIMITED, UNLIMITED)),
            log=self,
        )
        self._app = app_of(models, settings)
        self._count = 0

    def begin(self, entry: Entry) -> None:
        """Give the calls of a request the seeds that they had: the application logs to this."""
        entry.seeds = self._seeds.pop(entry.id)
        current.set(entry)

    def end(self, entry: Entry) -> None:
        """Take the record of a finished request."""
        self._entries[entry.id] = entry

    async def play(self, line: Mapping[str, Any]) -> PlayedRequest:
        """Run the request of a line of a log again, with the seeds that it had."""
        self._count += 1
        number = str(self._count)
        self._seeds[number] = [call.seed for call in calls_of(line)]
        began, used = time.perf_counter(), time.process_time()
        answer = await _answer(self._app, number, line)
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - used
        return PlayedRequest(self._entries.pop(number), seconds, cpu_seconds, answer)


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


_NEW_TOKENS = 24
_LETTERS = "etaoin shrdlu 0123 ETA."
"""The characters of prompts, some more often than others, so that tokens of several characters come."""
_SHORT, _MEDIUM = 40, 200
"""Characters of texts."""
_PROMPTS = 4
_COMPLETIONS, _CHATS = "/v1/completions", "/v1/chat/completions"
_EMBEDDINGS, _SCORES = "/v1/embeddings", "/v1/score"


def own_requests(served: Served, seed: int) -> list[dict[str, Any]]:
    """Return requests to a bundle; the same seed gives the same ones.

    For a decoder: short prompts, most likely tokens and seeded samples; one with the bundle's own sampling; a
    conversation, where it has a template; and one that fills the longest context. For an encoder: sentences
    or, if it scores, a query and texts.
    None for functions: golden answers try these.
    """
    config = served.bundle.config
    random = np.random.default_rng(seed)
    if config.encoder is not None and config.encoder.scores is not None:
        query, *texts = _sentences(random)
        if config.encoder.width > 1:  # the server has no route for several labels
            return []
        return [_line(_SCORES, {"text_1": query, "text_2": texts, "model": served.name})]
    if config.encoder is not None:
        return [
            _line(_EMBEDDINGS, {"input": each, "model": served.name}) for each in _sentences(random)
        ]
    if config.decoder is None or served.bundle.decoder.source is not None:
        return []
    return [*_texts(served, random, seed)]


def _sentences(random: np.random.Generator) -> list[str]:
    return [_text(random, size) for size in (_SHORT, _SHORT, _MEDIUM, _MEDIUM)]


def _texts(served: Served, random: np.random.Generator, seed: int) -> Iterator[dict[str, Any]]:
    longest = served.engine.plan.context
    most = min(_NEW_TOKENS, longest // 4)
    common = {"model": served.name, "max_tokens": most, "seed": seed}
    greedy = {**common, "temperature": 0, "ignore_eos": True}
    for size in (_SHORT, _MEDIUM) * (_PROMPTS // 2):
        prompt = _prompt(served, random, size, longest - most)
        yield _line(_COMPLETIONS, {**greedy, "prompt": prompt}, seed)
    prompt = _prompt(served, random, _SHORT, longest - most)
    yield _line(_COMPLETIONS, {**greedy, "temperature": 0.9, "prompt": prompt}, seed)
    yield _line(_COMPLETIONS, {**common, "prompt": prompt}, seed)
    if served.bundle.has_chat_template and served.bundle.has_tokenizer:
        said = [{"role": "user", "content": _text(random, _SHORT)}]
        yield _line(_CHATS, {**greedy, "messages": said}, seed)
    filling = _token_ids(served, random, longest - most)
    yield _line(_COMPLETIONS, {**greedy, "prompt": filling}, seed)


def _prompt(served: Served, random: np.random.Generator, size: int, most: int) -> str | list[int]:
    """Return a text of so many characters; token ids where there is no tokenizer or little context."""
    if served.bundle.has_tokenizer:
        text = _text(random, size)
        if len(served.bundle.tokenizer.encode(text)) <= most:
            return text
    return _token_ids(served, random, min(size, most))


def _token_ids(served: Served, random: np.random.Generator, count: int) -> list[int]:
    if not served.bundle.has_tokenizer:
        vocabulary = served.bundle.config.decoder.vocab_size  # type: ignore[union-attr]
        return [int(each) for each in random.integers(0, vocabulary, count)]
    found: list[int] = []
    while len(found) < count:  # a text may have fewer tokens than characters
        found += served.bundle.tokenizer.encode(_text(random, count))
    return [*map(int, found[:count])]


def _text(random: np.random.Generator, size: int) -> str:
    return "".join(random.choice(list(_LETTERS), size))


def _line(path: str, body: dict[str, Any], seed: int | None = None) -> dict[str, Any]:
    kind = "encode" if seed is None else "generate"
    return {
        "event": "request",
        "id": "",
        "method": "POST",
        "path": path,
        "status": 200,
        "headers": {"content-type": "application/json"},
        "body": json.dumps(body),
        "calls": [{"kind": kind, "model": body["model"], "seed": seed}],
    }
