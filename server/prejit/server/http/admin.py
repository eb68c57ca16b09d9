"""The endpoints for those who run a server, at an address of their own."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Annotated

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from prejit.runtime.errors import ClosedError, PrejitError
from prejit.server.gate import http_errors
from prejit.server.gate.http_errors import ApiError, json_response
from prejit.server.gate.origins import Origins
from prejit.server.gate.server_settings import Settings
from prejit.server.openai.bodies import served_model
from prejit.server.served.bundle_swaps import BundleSwaps
from prejit.server.served.served import ModelNotFoundError, Models
from prejit.server.telemetry.engine_profile import MAX_SECONDS, record

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

_log = logging.getLogger(__name__)
_POLL_SECONDS = 0.05
"""How often a drain looks whether anything runs."""


class SwapRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /swap.

    Attributes:
        model: the name of a served model; empty: the only one.
        bundle: a directory or a reference; empty: the one that the model was served from, which may lead to
            another bundle now.
    """

    model: str = ""
    bundle: str = ""


class ProfileRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /profile: how long to record."""

    seconds: Annotated[float, msgspec.Meta(gt=0, le=MAX_SECONDS)] = 2.0


def make_admin(
    models: Models, settings: Settings, swaps: BundleSwaps, origins: Origins | None
) -> ASGIApp:
    """Return the ASGI application of the admin address.

    Args:
        models: the served bundles.
        swaps: what POST /swap asks to load and exchange a bundle.
        settings: `drain_seconds` is how long POST /drain waits.
        origins: who may send requests to it; None: whoever reaches it, as a Unix socket.
    """

    async def post_drain(request: Request) -> Response:
        idle = await drain(models, settings.drain_seconds)
        return json_response({"state": models.state, "idle": idle}, 200 if idle else 202)

    async def post_undrain(request: Request) -> Response:
        if not models.undrain():
            raise ApiError(
                409, "expected a server that goes on, found one that ends", code="ending"
            )
        return json_response({"state": models.state})

    async def post_swap(request: Request) -> Response:
        try:
            wanted = msgspec.json.decode(await request.body() or b"{}", type=SwapRequest)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise http_errors.as_api_error(error) from None
        try:
            before = served_model(models, wanted.model or None)
            path = wanted.bundle or before.path
            # In a thread: to load, verify and try a bundle takes seconds.
            after = await asyncio.to_thread(swaps.swap, before.name, path)
        except PrejitError as error:
            text = f"{error}\nhint: {error.hint}" if error.hint else str(error)
            status = {ModelNotFoundError: 404, ClosedError: 503}.get(type(error), 409)
            raise ApiError(status, text, code=error.code) from error
        described = {
            "model": before.name,
            "before": before.bundle.digest,
            "now": after.bundle.digest,
        }
        return json_response(described)

    async def post_profile(request: Request) -> Response:
        try:
            wanted = msgspec.json.decode(await request.body() or b"{}", type=ProfileRequest)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise http_errors.as_api_error(error) from None
        each = [(served.name, served.bundle, served.engine) for served in models]
        try:
            # In a thread: it sleeps, and then packs what XLA recorded.
            found = await asyncio.to_thread(record, each, lambda: time.sleep(wanted.seconds))
        except PrejitError as error:
            raise ApiError(409, str(error), code=error.code) from error
        return Response(found, media_type="application/zip")

    app = Starlette(
        routes=[
            Route("/drain", post_drain, methods=["POST"]),
            Route("/undrain", post_undrain, methods=["POST"]),
            Route("/swap", post_swap, methods=["POST"]),
            Route("/profile", post_profile, methods=["POST"]),
        ],
        exception_handlers={HTTPException: http_errors.handle, ApiError: http_errors.handle},
    )
    if origins is None:
        return app

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            origins.check(scope["method"], dict(scope["headers"]))
        except ApiError as error:
            await http_errors.response(error, scope["path"])(scope, receive, send)
        else:
            await app(scope, receive, send)

    return guarded


async def drain(models: Models, seconds: float, *, ends: bool = False) -> bool:
    """Refuse new requests, and wait for those that run or wait; return whether none is left.

    Args:
        models: the served bundles.
        seconds: the longest wait. `Models.undrain` ends it too.
        ends: whether the server ends then, so that nothing undoes it.
    """
    until = time.monotonic() + seconds
    _log.info("draining, for at most %g s%s", seconds, ", to end" if ends else "")
    while not (idle := models.drain(ends=ends)) and time.monotonic() < until:
        await asyncio.sleep(_POLL_SECONDS)
        if models.state != "draining":
            return False
    _log.info("drained: %s", "nothing runs" if idle else "some requests still run")
    return idle
