"""Read the lengths and batch sizes of requests: the log of `prejit serve`, JSON lines, or CSV."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from prejit.runtime.errors import StoreError, UsageError

MAX_LENGTH = 1 << 24
"""The largest number of tokens or rows that a log may name."""

_HINT = (
    "give the log of `prejit serve --log`, or lines with prompt_tokens and new_tokens (a decoder) or "
    "length (an encoder), and batch where it is known"
)


@dataclass(frozen=True, slots=True)
class LoggedGeneration:
    """A request to a decoder.

    Attributes:
        prompt_tokens: tokens of its prompt that were computed.
        reused_tokens: tokens of its prompt that were taken from an earlier text.
        new_tokens: tokens that were generated.
        batch: sequences that were decoded together; None: not known.
    """

    prompt_tokens: int
    new_tokens: int
    reused_tokens: int = 0
    batch: int | None = None

    @property
    def length(self) -> int:
        """Tokens of the prompt and of what was generated."""
        return self.reused_tokens + self.prompt_tokens + self.new_tokens


@dataclass(frozen=True, slots=True)
class LoggedEncoding:
    """A request to an encoder."""

    length: int
    batch: int = 1


@dataclass(frozen=True, slots=True)
class LoggedRequests:
    """The contents of a log.

    Attributes:
        generations: requests to a decoder, each with the number of times that it occurs.
        encodings: the same for an encoder.
        seconds_at: seconds during which a number of generations ran at once; empty: the log has no times.
    """

    generations: Mapping[LoggedGeneration, int]
    encodings: Mapping[LoggedEncoding, int]
    seconds_at: Mapping[int, float]


def read_log(path: Path, model: str | None = None) -> LoggedRequests:
    """Read a log.

    Args:
        path: a file of JSON lines, or one that ends in `.csv` and has a line of names first.
        model: the name of the bundle in a log of a server; None: the only one that it names.

    Raises:
        StoreError: the file cannot be read.
        UsageError: a line is none of the known ones, there is no request at all, or the log has several
            bundles and `model` names none of them.
    """
    requests: Counter[tuple[str | None, LoggedGeneration | LoggedEncoding]] = Counter()
    running: list[tuple[str, float, float]] = []
    try:
        with path.open(encoding="utf-8") as file:
            for bundle, request, span in _requests(file, path):
                requests[bundle, request] += 1
                if bundle is not None and span is not None:
                    running.append((bundle, *span))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise StoreError(f"{path}: cannot read: {reason}") from error
    name = _only_model({bundle for bundle, _ in requests if bundle is not None}, model, path)
    generations: Counter[LoggedGeneration] = Counter()
    encodings: Counter[LoggedEncoding] = Counter()
    for (bundle, request), count in requests.items():
        if bundle not in (None, name):
            continue
        if isinstance(request, LoggedGeneration):
            generations[request] += count
        else:
            encodings[request] += count
    if not generations and not encodings:
        raise UsageError(f"{path}: expected requests with lengths, found none", hint=_HINT)
    spans = ((start, end) for bundle, start, end in running if bundle == name)
    return LoggedRequests(generations, encodings, _seconds_at(spans))


def _requests(
    file: TextIO, path: Path
) -> Iterator[tuple[str | None, LoggedGeneration | LoggedEncoding, tuple[float, float] | None]]:
    """Yield each request with its bundle, and when it ran if it is a generation in a server's log."""
    rows = _csv_rows(file) if path.suffix == ".csv" else _json_rows(file, path)
    for number, row in rows:
        where = f"{path}: line {number}"
        if row.get("event") == "request":
            for model, found in _server_calls(row, where):
                span = None
                if isinstance(found, LoggedGeneration):
                    end = float(row["time"])
                    span = end - float(row["seconds"]), end
                yield model, found, span
        elif "event" not in row:
            yield None, _request(row, where), None


def _only_model(names: set[str], model: str | None, path: Path) -> str | None:
    if model is None and len(names) <= 1:
        return next(iter(names), None)
    if names and model not in names:
        listed = ", ".join(sorted(names))
        found = "none chosen" if model is None else f"{model!r}"
        raise UsageError(
            f"{path}: expected one of the bundles of the log ({listed}), found {found}",
            hint="name it: --model NAME",
        )
    return model


def _csv_rows(lines: Iterable[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    reader = csv.DictReader(lines, skipinitialspace=True)
    for row in reader:
        yield reader.line_num, {name: value for name, value in row.items() if value}


def _json_rows(lines: Iterable[str], path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UsageError(
                f"{path}: line {number}: expected JSON: {error}", hint=_HINT
            ) from error
        if not isinstance(row, dict):
            raise UsageError(
                f"{path}: line {number}: expected an object, found {line[:60]!r}", hint=_HINT
            )
        yield number, row


def _server_calls(
    row: Mapping[str, Any], where: str
) -> Iterator[tuple[str, LoggedGeneration | LoggedEncoding]]:
    """Yield the calls of engines in a line of a server's log, without those that failed."""
    try:
        float(row["time"]), float(row["seconds"])
        for call in row["calls"]:
            if (found := _server_call(call, where)) is not None:
                yield str(call["model"]), found
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(
            f"{where}: expected a line of a server's log, found another: {error}", hint=_HINT
        ) from error


def _server_call(call: Mapping[str, Any], where: str) -> LoggedGeneration | LoggedEncoding | None:
    """Return a call of an engine in the log of a server; None: it has no lengths, because it failed."""
    if call.get("kind") == "generate" and "prompt_tokens" in call:
        reused = _count(call, "reused_tokens", where, default=0)
        prompt = _count(call, "prompt_tokens", where)
        return LoggedGeneration(max(0, prompt - reused), _count(call, "new_tokens", where), reused)
    if call.get("kind") == "encode" and call.get("sentences"):
        sentences = _count(call, "sentences", where)
        return LoggedEncoding(-(-_count(call, "tokens", where) // sentences), sentences)
    return None


def _request(row: Mapping[str, Any], where: str) -> LoggedGeneration | LoggedEncoding:
    """Return the request of a line that the user wrote."""
    if "prompt_tokens" in row:
        batch = _count(row, "batch", where, least=1) if "batch" in row else None
        reused = _count(row, "reused_tokens", where, default=0)
        prompt = max(0, _count(row, "prompt_tokens", where) - reused)
        return LoggedGeneration(prompt, _count(row, "new_tokens", where), reused, batch)
    if "length" in row:
        return LoggedEncoding(
            _count(row, "length", where, least=1), _count(row, "batch", where, least=1, default=1)
        )
    found = ", ".join(map(str, row)) or "nothing"
    raise UsageError(f"{where}: expected prompt_tokens or length, found {found}", hint=_HINT)


def _count(
    row: Mapping[str, Any], name: str, where: str, *, least: int = 0, default: int | None = None
) -> int:
    value = row.get(name, default)
    try:
        count = int(value) if not isinstance(value, bool) else -1
        exact = count == float(value)
    except (TypeError, ValueError, OverflowError):
        count, exact = -1, False
    if not exact or not least <= count <= MAX_LENGTH:
        raise UsageError(
            f"{where}: {name}: expected a number from {least} to {MAX_LENGTH}, found {value!r:.40}",
            hint=_HINT,
        )
    return count


def _seconds_at(spans: Iterable[tuple[float, float]]) -> dict[int, float]:
    """Return how many seconds each number of spans ran at once."""
    changes: Counter[float] = Counter()
    for start, end in spans:
        if end > start:
            changes[start] += 1
            changes[end] -= 1
    found: dict[int, float] = {}
    running, since = 0, 0.0
    for moment in sorted(changes):
        if running:
            found[running] = found.get(running, 0.0) + moment - since
        running, since = running + changes[moment], moment
    return found
