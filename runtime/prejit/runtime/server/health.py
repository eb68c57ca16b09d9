"""/health/live, /health/ready and /drain, for those who start and stop servers."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from prejit.runtime.server.errors import RETRY_SECONDS
from prejit.runtime.server.served import Models
from prejit.runtime.server.settings import Settings


def routes(models: Models, settings: Settings) -> list[Route]:
    """Return the routes of health.

    Args:
        models: the served bundles.
        settings: the limits; `drain_seconds` is how long POST /drain waits.
    """

    async def live(request: Request) -> Response:
        return _answer(200, {"state": models.state})

    async def ready(request: Request) -> Response:
        described: dict[str, Any] = {"state": models.state, "models": [one.name for one in models]}
        if models.wrong:
            described["wrong_answers"] = dict(models.wrong)
        return _answer(200 if models.is_ready else 503, described)

    async def drain(request: Request) -> Response:
        # A thread of its own: the pool of the handlers may be busy with what is to be waited for.
        idle = await asyncio.to_thread(models.drain, settings.drain_seconds)
        return _answer(200 if idle else 202, {"state": models.state, "idle": idle})

    return [
        Route("/health/live", live),
        Route("/health/ready", ready),
        Route("/drain", drain, methods=["POST"]),
    ]


def _answer(status: int, content: dict[str, Any]) -> Response:
    headers = {"Retry-After": str(RETRY_SECONDS)} if status == 503 else None
    return Response(
        msgspec.json.encode(content), status, headers=headers, media_type="application/json"
    )
