"""The endpoints for those who run a server, at an address of their own."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from prejit.runtime.errors import ClosedError, PrejitError
from prejit.server.engine.memory import NoRoomError
from prejit.server.gate import http_errors
from prejit.server.gate.http_errors import ApiError, json_response
from prejit.server.gate.request_clients import Origins, unless_gone
from prejit.server.gate.server_settings import Settings
from prejit.server.openai.bodies import served_model
from prejit.server.releases.canary_runs import Canaries, share_of
from prejit.server.served.bundle_swaps import BundleSwaps
from prejit.server.served.served import ModelNotFoundError, Models
from prejit.server.served.served_loading import MODEL_NAME
from prejit.server.served.work_threads import in_admin_thread
from prejit.server.telemetry.engine_profile import MAX_SECONDS, record

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

_log = logging.getLogger(__name__)
_STATUS = {ModelNotFoundError: 404, ClosedError: 503, NoRoomError: 507}
"""The status of errors; of others it is 409."""
_POLL_SECONDS = 0.05
"""How often a drain looks whether anything runs."""


class ModelRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /remove, /sleep and /wake.

    Attributes:
        model: the name of a served model; empty: the only one.
    """

    model: str = ""


class SwapRequest(ModelRequest, frozen=True, forbid_unknown_fields=True):
    """The body of POST /swap.

    Attributes:
        bundle: a directory or a reference; empty: the one that the model was served from, which may lead to
            another bundle now.
    """

    bundle: str = ""


class ProfileRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /profile: how long to record."""

    seconds: Annotated[float, msgspec.Meta(gt=0, le=MAX_SECONDS)] = 2.0


class AddRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /add.

    Attributes:
        bundle: a directory or a reference.
        model: the name that clients will give, as in `prejit serve NAME=PATH`; empty: the bundle's own.
    """

    bundle: str
    model: str = ""


class LoadAdapterRequest(ModelRequest, frozen=True, forbid_unknown_fields=True):
    """The body of POST /v1/load_lora_adapter, as vLLM has it.

    Attributes:
        lora_name: the name that requests give, behind that of the model and a colon.
        lora_path: the directory that PEFT's save_pretrained wrote, on the server.
    """

    lora_name: str = ""
    lora_path: str = ""


class UnloadAdapterRequest(ModelRequest, frozen=True, forbid_unknown_fields=True):
    """The body of POST /v1/unload_lora_adapter, as vLLM has it; see `LoadAdapterRequest`."""

    lora_name: str = ""


class CanaryRequest(ModelRequest, frozen=True, forbid_unknown_fields=True):
    """The body of POST /canary.

    Attributes:
        action: `start` a canary; `promote` its release now; `abort` it.
        bundle: of `start`: the release, a directory or a reference.
        share: of `start`: the share of requests that it answers.
    """

    action: Literal["start", "promote", "abort"] = "start"
    bundle: str = ""
    share: str = "5%"


_Body = TypeVar("_Body", bound=msgspec.Struct)


def make_admin(
    models: Models,
    settings: Settings,
    swaps: BundleSwaps,
    canaries: Canaries,
    origins: Origins | None,
) -> ASGIApp:
    """Return the ASGI application of the admin address.

    Args:
        models: the served bundles.
        swaps: loads, exchanges and removes bundles.
        canaries: tries releases.
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

    def swap(wanted: SwapRequest) -> dict[str, Any]:
        before = served_model(models, wanted.model or None)
        after = swaps.swap(before.name, wanted.bundle or before.path)
        return {"model": before.name, "before": before.bundle.digest, "now": after.bundle.digest}

    def add(wanted: AddRequest) -> dict[str, Any]:
        if wanted.model and not MODEL_NAME.fullmatch(wanted.model):
            problem = "expected a letter or a digit, then letters, digits, `_`, `.` or `-`"
            raise http_errors.field_error("model", f"{problem}, found {wanted.model!r:.80}")
        added = swaps.add(wanted.model, wanted.bundle)
        return {"model": added.name, "now": added.bundle.digest}

    def remove(wanted: ModelRequest) -> dict[str, Any]:
        removed = swaps.remove(served_model(models, wanted.model or None).name)
        return {"model": removed.name, "before": removed.bundle.digest}

    def sleep(wanted: ModelRequest) -> dict[str, Any]:
        served = served_model(models, wanted.model or None)
        if not served.engine.sleep():
            raise ApiError(
                409,
                f"{served.name}: expected a model without requests, found some that run or wait",
                code="busy",
            )
        return {"model": served.name, "is_sleeping": True}

    def wake(wanted: ModelRequest) -> dict[str, Any]:
        woken = swaps.wake(served_model(models, wanted.model or None).name)
        return {"model": woken.name, "is_sleeping": False}

    def load_adapter(wanted: LoadAdapterRequest) -> dict[str, Any]:
        name = served_model(models, wanted.model or None).name
        if not wanted.lora_path or not os.path.isdir(wanted.lora_path):
            problem = f"expected a directory on the server, found {wanted.lora_path!r:.200}"
            raise http_errors.field_error("lora_path", problem)
        loaded = swaps.load_adapter(name, wanted.lora_name, wanted.lora_path)
        return {"model": f"{name}:{loaded.name}", "now": loaded.digest}

    def unload_adapter(wanted: UnloadAdapterRequest) -> dict[str, Any]:
        name = served_model(models, wanted.model or None).name
        swaps.unload_adapter(name, wanted.lora_name)
        return {"model": f"{name}:{wanted.lora_name}"}

    async def post_profile(request: Request) -> Response:
        await request.body()  # behind it comes only that the client has gone
        ends = threading.Event()

        def profile(wanted: ProfileRequest) -> Response:
            each = [(served.name, served.bundle, served.engine) for served in models]
            found = record(each, lambda: ends.wait(wanted.seconds))
            return Response(found, media_type="application/zip")

        try:
            return await unless_gone(request.receive, _handler(ProfileRequest, profile)(request))
        finally:
            ends.set()

    async def get_canary(request: Request) -> Response:
        return json_response({"canaries": [asdict(each) for each in canaries.states()]})

    def canary(wanted: CanaryRequest) -> Response:
        name = served_model(models, wanted.model or None).name
        if wanted.action != "start":
            return json_response(asdict(canaries.finish(name, wanted.action)))
        if not wanted.bundle:
            raise http_errors.field_error("bundle", "expected the release to try, found none")
        begun = canaries.start(name, wanted.bundle, share_of(wanted.share))
        return json_response(asdict(begun), 202)

    app = Starlette(
        routes=[
            Route("/drain", post_drain, methods=["POST"]),
            Route("/undrain", post_undrain, methods=["POST"]),
            _post("/swap", SwapRequest, swap),
            _post("/add", AddRequest, add),
            _post("/remove", ModelRequest, remove),
            _post("/sleep", ModelRequest, sleep),
            _post("/wake", ModelRequest, wake),
            _post("/v1/load_lora_adapter", LoadAdapterRequest, load_adapter),
            _post("/v1/unload_lora_adapter", UnloadAdapterRequest, unload_adapter),
            Route("/canary", get_canary, methods=["GET"]),
            _post("/canary", CanaryRequest, canary),
            Route("/profile", post_profile, methods=["POST"]),
        ],
        exception_handlers=dict.fromkeys(
            (HTTPException, ApiError, ClientDisconnect), http_errors.handle
        ),
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


def _post(
    path: str, kind: type[_Body], work: Callable[[_Body], dict[str, Any] | Response]
) -> Route:
    return Route(path, _handler(kind, work), methods=["POST"])


def _handler(
    kind: type[_Body], work: Callable[[_Body], dict[str, Any] | Response]
) -> Callable[[Request], Awaitable[Response]]:
    """Return a handler that reads a body, and answers with what some work returns, which takes seconds."""

    async def handle(request: Request) -> Response:
        try:
            wanted = msgspec.json.decode(await request.body() or b"{}", type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise http_errors.as_api_error(error) from None
        try:
            found = await in_admin_thread(partial(work, wanted))
            return found if isinstance(found, Response) else json_response(found)
        except PrejitError as error:
            text = f"{error}\nhint: {error.hint}" if error.hint else str(error)
            raise ApiError(_STATUS.get(type(error), 409), text, code=error.code) from error

    return handle


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
