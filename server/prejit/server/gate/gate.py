"""The gate of every request: its id, the key, the limits, and the record of it."""

from __future__ import annotations

import asyncio
import re
import time
import traceback
import uuid
from typing import TYPE_CHECKING, Any, final

from prejit.runtime.errors import ClosedError
from prejit.server.gate.http_errors import RETRY_SECONDS, ApiError, as_api_error, response
from prejit.server.gate.server_settings import Settings
from prejit.server.served.process_upkeep import say
from prejit.server.served.served import Models, asking
from prejit.server.telemetry.requestlog import KEPT_HEADERS, Entry

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from prejit.server.gate.api_keys import ApiKey

ABORT = "prejit.abort"
"""Extension of a scope: a function that cuts the connection, unsent bytes included (connections.py)."""

GRACE_SECONDS = 30.0
"""How much longer than its time a request may take until its connection is cut. The engine ends it in time;
a slow client needs some more to read the rest."""

BODY_SECONDS = 30.0
"""How long the next part of a body may take to come."""

_OPEN = re.compile(r"/|/page/.*|/health(/live|/ready)?|/version|/metrics|/v2/health/(live|ready)")
"""Paths that need no key and are answered in every state: probes, metrics, the files of the page."""
_ID = re.compile(rb"[!-~]{1,128}")
"""A request id that a client may choose."""


@final
class Gate:
    """The middleware of all requests."""

    def __init__(self, app: ASGIApp, models: Models, settings: Settings) -> None:
        self._app = app
        self._models = models
        self._settings = settings
        self._running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = _Request(scope, receive, send, self._settings, self._models)
        self._running += 1
        epoch = self._models.running.begin()
        try:
            self._check(scope, request)
            if self._models.canaries:
                asking.set(request.who)
            async with asyncio.timeout(self._settings.timeout_seconds + GRACE_SECONDS):
                await self._app(scope, request.receive, request.send)
        except Exception as error:
            await self._fail(scope, request, error)
        finally:
            self._running -= 1
            self._models.running.end(epoch)
            request.finish(scope)

    def _check(self, scope: Scope, request: _Request) -> None:
        """Refuse a request that is foreign, too early, too late, without a key, one too many or too large."""
        settings = self._settings
        if settings.origins is not None:
            settings.origins.check(scope["method"], request.headers)
        if _OPEN.fullmatch(scope["path"]):
            return
        if settings.keys is not None:
            key = settings.keys.find(request.headers.get(b"authorization", b"").decode("latin-1"))
            if key is None:
                raise ApiError(
                    401,
                    "Authorization: expected `Bearer` and a key of this server",
                    type="authentication_error",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
            request.set_key(key)
        if self._models.state != "ready":
            raise ClosedError(f"the server is {self._models.state}")
        if self._running > settings.clients:
            raise ApiError(
                503,
                f"expected at most {settings.clients} requests at once, found {self._running}",
                type="server_error",
                code="too_many_requests",
                headers={"Retry-After": str(RETRY_SECONDS)},
            )
        length = request.headers.get(b"content-length", b"")
        if length and int(length) > settings.body_bytes:
            raise request.too_large(int(length))
        if request.framing.lower() not in ("", "chunked"):
            raise ApiError(
                501,
                f"Transfer-Encoding: expected chunked alone, found {request.framing!r:.80}",
                code="unsupported_encoding",
            )
        coding = request.headers.get(b"content-encoding", b"").decode("latin-1").strip()
        if coding.lower() not in ("", "identity"):
            raise ApiError(
                415,
                f"Content-Encoding: expected a body that is not compressed, found {coding!r:.80}",
                code="unsupported_encoding",
                headers={"Accept-Encoding": "identity"},
            )

    async def _fail(self, scope: Scope, request: _Request, error: Exception) -> None:
        """Answer a request that failed, or cut its connection if the answer has begun."""
        if type(error) is TimeoutError:  # of this gate; an engine raises DeadlineError
            error = ApiError(
                504,
                f"expected the request to take at most {self._settings.timeout_seconds:g} seconds",
                type="timeout_error",
                code="deadline",
            )
        refused = as_api_error(error)
        if refused.status == 500:
            self._models.suspected.set()
            found = "".join(traceback.format_exception(error)).rstrip()
            say(f"request {request.id} failed:\n{found}")
        if not request.status:
            await response(refused, scope["path"])(scope, request.receive, request.send)
            return
        request.failed = refused.code or "error"
        abort = scope.get("extensions", {}).get(ABORT)
        if abort is not None:
            abort()


class _Request:
    """A request on its way: its id, its body's size, and its record."""

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, settings: Settings, models: Models
    ) -> None:
        self._models = models
        self._receive = receive
        self._send = send
        self._most = settings.body_bytes
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        framing = (value for name, value in scope["headers"] if name == b"transfer-encoding")
        self.framing = b", ".join(framing).decode("latin-1").strip()
        given = self.headers.get(b"x-request-id", b"")
        self.id = given.decode() if _ID.fullmatch(given) else uuid.uuid4().hex
        self.status = 0
        self.failed = ""
        self._began = time.monotonic()
        self._taken = 0
        self._is_whole = False
        # A dict of its own: uvicorn gives all requests of a connection copies, other servers may not.
        self._state: dict[str, Any] = {
            **scope.get("state", {}),
            "id": self.id,
            "key": settings.anybody,
            "client": settings.anybody.name,
            "suspected": models.suspected,
        }
        scope["state"] = self._state
        self._log = (settings.tap() if settings.tap is not None else None) or settings.log
        self._entry: Entry | None = None
        if self._log is not None:
            kept = {
                name.decode(): self.headers[name].decode("latin-1")
                for name in KEPT_HEADERS
                if name in self.headers
            }
            self._entry = Entry(self.id, scope["method"], scope["path"], kept, time.monotonic())
            self._log.begin(self._entry)

    @property
    def who(self) -> str:
        """The name of its key, or else its id."""
        return self._state["client"] or self.id

    def set_key(self, key: ApiKey) -> None:
        """Give the request its key."""
        self._state |= {"key": key, "client": key.name}

    def too_large(self, found: int) -> ApiError:
        """Return the error for a body of so many bytes."""
        return ApiError(
            413,
            f"body: expected at most {self._most} bytes, found {found}",
            code="body_too_large",
            headers={"Connection": "close"},  # what the client still sends is not read
        )

    async def receive(self) -> Message:
        """Receive a part of the body."""
        if self._is_whole:  # what comes now is that the client has gone, at any time
            return await self._receive()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                message = await self._receive()
        except TimeoutError:
            raise ApiError(
                408,
                f"body: expected its next part within {BODY_SECONDS:g} seconds",
                code="slow_body",
                headers={"Connection": "close"},
            ) from None
        if message["type"] == "http.request":
            body = message.get("body", b"")
            self._is_whole = not message.get("more_body", False)
            self._taken += len(body)
            if self._taken > self._most:
                raise self.too_large(self._taken)
            if self._entry is not None:
                self._entry.body += body
        return message

    def send(self, message: Message) -> Awaitable[None]:
        """Send a part of the response. It is no coroutine, because a stream has a part for each token."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), (b"x-request-id", self.id.encode())]
            if message["status"] == 503 and self._models.state == "draining":
                # The client finds another server by connecting again.
                message["headers"].append((b"connection", b"close"))
            if self._entry is not None:
                self._entry.status = message["status"]
        return self._send(message)

    def finish(self, scope: Scope) -> None:
        """Count the request, and write its record."""
        is_open = _OPEN.fullmatch(scope["path"]) is not None
        if not is_open:
            self._models.http.answered(scope, self.status, time.monotonic() - self._began)
        if self._log is not None and self._entry is not None:
            self._entry.client = self._state["client"]
            self._entry.failed = self.failed
            self._entry.is_open = is_open
            self._log.end(self._entry)
