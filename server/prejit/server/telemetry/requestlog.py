"""The log of requests: JSON lines from which `prejit replay` runs each request again.

    {"event":"start","time":...,"models":[{"name":"demo","path":"artifacts/demo","digest":"sha256:...","target":"cpu-host"}],"max_tokens":null}
    {"event":"request","time":...,"id":"...","client":"","method":"POST","path":"/v1/completions","status":200,"seconds":0.41,
     "failed":"","headers":{"content-type":"application/json"},"body":"{...}","calls":[...]}

A body that is no UTF-8 is `body_base64`. `calls` has what each call of an engine gave:

    {"kind":"generate","model":"demo","seed":7,"token_ids":[17,4],"finish_reason":"length","prompt_tokens":9,...}
    {"kind":"encode","model":"demo","sentences":2,"tokens":31,
     "arrays":{"embeddings":{"dtype":"float32","shape":[2,384],"digest":"...","norm":1.41}}}

Handlers do not deal with it: `record` watches each engine, and finds its request by a context variable.
"""

from __future__ import annotations

import base64
import hashlib
import math
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, final

import msgspec
import numpy as np

from prejit.runtime.base.files import store_errors
from prejit.runtime.errors import StoreError
from prejit.runtime.generation.generate import Piece
from prejit.runtime.ship.reference import is_reference, without_login
from prejit.server.served.process_upkeep import say
from prejit.server.telemetry.watched_engine import EngineCall, Watch

if TYPE_CHECKING:
    from prejit.runtime.encoding.encoder import Encoded
    from prejit.runtime.generation.finished_text import Result
    from prejit.server.served.served import Models

KEPT_HEADERS = (b"content-type", b"inference-header-content-length")
"""The headers that change what a body means."""

_TIMES = ("prompt_tokens", "reused_tokens", "new_tokens", "queue_seconds", "first_token_seconds")
"""The statistics of a generation that a line has."""


@dataclass(slots=True)
class RecordedCall:
    """A call of an engine.

    Attributes:
        kind: `generate`, `encode` or `call`.
        model: name of the bundle.
        program: the program that `call` ran.
        seed: the seed of a generation that the handler gave; None: it gave none.
        token_ids: what was generated.
        finish_reason: as in `Result`; empty: the generation did not end.
        arrays: what each array of results was: dtype, shape, digest of its bytes, norm.
        stats: parts of the statistics of a generation, or of the sentences that were encoded.
    """

    kind: str
    model: str
    program: str | None = None
    seed: int | None = None
    token_ids: list[int] | None = None
    finish_reason: str = ""
    arrays: dict[str, Any] | None = None
    stats: dict[str, float] = field(default_factory=dict)

    def described(self) -> dict[str, Any]:
        """Return the call as a line has it."""
        found: dict[str, Any] = {"kind": self.kind, "model": self.model}
        if self.kind == "generate":
            found |= {"seed": self.seed, "token_ids": self.token_ids}
            found["finish_reason"] = self.finish_reason
        found |= self.stats
        if self.program is not None:
            found["program"] = self.program
        if self.arrays is not None:
            found["arrays"] = self.arrays
        return found


@dataclass(slots=True)
class Entry:
    """A request on its way.

    Attributes:
        id, method, path: of the request.
        headers: those in KEPT_HEADERS.
        started: when it came, by `time.monotonic`: the clock of days may jump meanwhile.
        status: of its response; 0: none was sent.
        client: the name of its key.
        failed: the code of an error after the response had begun.
        body: what was received.
        calls: its calls of engines, in order.
        is_open: whether its path is one of probes, of scrapers or of the page, which needs no key.
        seeds: seeds that replace those of the handler, in the order of calls; None: they stay.
    """

    id: str
    method: str
    path: str
    headers: dict[str, str]
    started: float
    status: int = 0
    client: str = ""
    failed: str = ""
    body: bytearray = field(default_factory=bytearray)
    calls: list[RecordedCall] = field(default_factory=list)
    is_open: bool = False
    seeds: Sequence[int | None] | None = None


current: ContextVar[Entry | None] = ContextVar("current", default=None)
"""The request whose handler runs."""


class Log(Protocol):
    """What takes the records of requests."""

    def begin(self, entry: Entry) -> None:
        """Take what engines give this task from now on as results of this request."""

    def end(self, entry: Entry) -> None:
        """Take the record of a finished request."""


@final
class RequestLog:
    """The file that gets the lines."""

    def __init__(self, path: str) -> None:
        """Open it for appending, readable for its owner alone: it holds prompts. `-` is stdout.

        Raises:
            StoreError: it cannot be opened, or others could read it.
        """
        self._path = os.path.abspath(path) if path != "-" else path
        self._file = _open(self._path)
        self._begin: dict[str, Any] | None = None  # the line that a replay needs first
        self._is_failing = False
        self._before = b""
        self._models: Models | None = None

    def start(self, models: Models, *, max_tokens: int | None) -> None:
        """Write which bundles are served from now on, for a replay.

        Args:
            models: the bundles. They count the lines that cannot be written.
            max_tokens: the limit of new tokens.
        """
        self._models = models
        described = [
            {
                "name": one.name,
                "path": _absolute(one.path),
                "digest": one.bundle.digest,
                "target": one.bundle.target,
            }
            for one in models
        ]
        self._begin = {"event": "start", "models": described, "max_tokens": max_tokens}
        self._write({**self._begin, "time": time.time()})

    def reopen(self) -> None:
        """Write to the file that has the path now, after another program has moved the one before."""
        try:
            file = _open(self._path)
        except StoreError as error:
            say(f"warning: {error}: requests go to the file that was open")
            return
        is_other = not os.path.sameopenfile(file, self._file)
        os.dup2(file, self._file, inheritable=False)
        os.close(file)
        if is_other and self._begin is not None:
            self._write({**self._begin, "time": time.time()})

    def begin(self, entry: Entry) -> None:
        """Take what engines give this task from now on as results of this request."""
        current.set(entry)

    def end(self, entry: Entry) -> None:
        """Write the line of a request. A probe, a scrape or a poll of the page has one only if it failed."""
        if entry.is_open and 200 <= entry.status < 400 and not entry.failed:
            return
        self._write(line_of(entry))

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _write(self, line: Mapping[str, Any]) -> None:
        """Append a line. A full disk must not stop requests: the first of several failures is reported."""
        whole = left = memoryview(self._before + msgspec.json.encode(line) + b"\n")
        try:
            while left:
                left = left[os.write(self._file, left) :]
            self._is_failing, self._before = False, b""
        except OSError as error:
            if len(left) < len(whole):
                self._before = b"\n"  # so that the next line is none with what is there of this one
            if not self._is_failing:
                say(f"warning: {self._path}: cannot write: {error.strerror}")
            self._is_failing = True
            if self._models is not None:
                self._models.log_lines_lost += 1


def log_lines(path: str, notes: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the lines of a log. One that is no JSON, as a crash leaves it, is noted and left out.

    Raises:
        StoreError: the log cannot be read.
    """
    with store_errors(path, "read the log"), open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                found = msgspec.json.decode(line)
            except msgspec.DecodeError:
                found = None
            if isinstance(found, dict):
                yield found
            elif notes is not None:
                notes.append(f"{path}: line {number} is no JSON object")


def body_of(line: Mapping[str, Any]) -> bytes:
    """Return the body of the request of a line."""
    return line["body"].encode() if "body" in line else base64.b64decode(line["body_base64"])


def line_of(entry: Entry) -> dict[str, Any]:
    """Return the line of a request that ends now."""
    line: dict[str, Any] = {
        "event": "request",
        "time": time.time(),
        "id": entry.id,
        "client": entry.client,
        "method": entry.method,
        "path": entry.path,
        "status": entry.status,
        "seconds": round(time.monotonic() - entry.started, 6),
        "failed": entry.failed,
        "headers": entry.headers,
    }
    try:
        line["body"] = entry.body.decode()
    except UnicodeDecodeError:
        line["body_base64"] = base64.b64encode(entry.body).decode()
    return line | {"calls": [call.described() for call in entry.calls]}


def _open(path: str) -> int:
    """Return a descriptor that appends to a file; `-` is stdout."""
    with store_errors(
        path,
        "write the log",
        hint="give --log a file that this user may write, or one that is not there",
    ):
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        file = os.dup(1) if path == "-" else os.open(path, flags, 0o600)
    found = os.fstat(file)
    if path != "-" and stat.S_ISREG(found.st_mode) and found.st_mode & 0o077:
        try:
            os.fchmod(file, 0o600)
        except OSError as error:
            os.close(file)
            raise StoreError(
                f"{path}: expected a log that its owner alone can read, because it holds prompts; found mode "
                f"{stat.S_IMODE(found.st_mode):o} of another owner",
                hint="move it away, or give another --log",
            ) from error
    return file


def record(call: EngineCall) -> Watch | None:
    """Return what adds the results of a call to the entry of the request that makes it."""
    if (entry := current.get()) is None:
        return None
    seeds, place = entry.seeds or (), len(entry.calls)
    if call.kind == "generate" and place < len(seeds) and (seed := seeds[place]) is not None:
        call.options["seed"] = seed  # of the log that is replayed
    one = RecordedCall(call.kind, call.model, call.program or None, call.options.get("seed"))
    entry.calls.append(one)
    return partial(_TAKE[call.kind], one)


def _take_generation(call: RecordedCall, found: Result | Piece) -> None:
    if isinstance(found, Piece):
        call.token_ids = [] if call.token_ids is None else call.token_ids
        if found.token_id is not None:
            call.token_ids.append(found.token_id)
    else:
        call.token_ids = list(found.token_ids)
    if found.finish_reason is not None:
        call.finish_reason = found.finish_reason
        if found.stats is not None:
            call.stats = {name: round(getattr(found.stats, name), 6) for name in _TIMES}


def _take_embeddings(call: RecordedCall, found: Encoded) -> None:
    call.arrays = {"embeddings": describe_array(np.asarray(found.embeddings))}
    call.stats = {"sentences": found.stats.sentences, "tokens": found.stats.tokens}


def _take_arrays(call: RecordedCall, found: Any) -> None:
    leaves = _leaves(found).items()
    call.arrays = {name: describe_array(np.asarray(value)) for name, value in leaves}


_TAKE: Mapping[str, Callable[[RecordedCall, Any], None]] = {
    "generate": _take_generation,
    "encode": _take_embeddings,
    "call": _take_arrays,
}
"""Add what a call of each kind gives to its record."""


def describe_array(array: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Return what a line has of an array: its bytes as a digest, and a norm that rounding moves little."""
    whole = np.ascontiguousarray(array)
    described = {
        "dtype": str(array.dtype),
        "shape": list(array.shape),
        "digest": hashlib.sha256(whole.tobytes()).hexdigest()[:32],
    }
    norm = math.nan
    if array.dtype.kind not in "bc":
        norm = float(np.linalg.norm(whole.astype(np.float64).ravel()))
    return described | ({"norm": norm} if math.isfinite(norm) else {})


def _leaves(value: Any, at: str = "result") -> dict[str, Any]:
    """Return the arrays of the results of a program by a name for each place."""
    if isinstance(value, Mapping):
        parts: Any = value.items()
    elif isinstance(value, list | tuple):
        parts = enumerate(value)
    elif hasattr(value, "__dataclass_fields__"):
        parts = ((name, getattr(value, name)) for name in value.__dataclass_fields__)
    else:
        return {} if value is None else {at: value}
    return {k: v for key, part in parts for k, v in _leaves(part, f"{at}.{key}").items()}


def _absolute(path: str) -> str:
    """Return what a replay in another directory can load: a path, or a reference without its password."""
    return without_login(path) if is_reference(path) else os.path.abspath(path)
