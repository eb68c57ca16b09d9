"""/health, /health/live and /health/ready for those who start and stop servers, and /version."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from prejit.server.gate.http_errors import RETRY_SECONDS
from prejit.server.served.served import Models


def routes(models: Models) -> list[Route]:
    """Return the routes of health.

    Args:
        models: the served bundles.
    """

    async def live(request: Request) -> Response:
        return _answer(200, {"state": models.state})

    async def ready(request: Request) -> Response:
        described: dict[str, Any] = {"state": models.state, "models": [one.name for one in models]}
        if models.wrong:
            described["wrong_answers"] = dict(models.wrong)
        return _answer(200 if models.is_ready else 503, described)

    async def show_version(request: Request) -> Response:
        return _answer(200, {"version": version("prejit")})

    return [
        Route("/health", ready),
        Route("/health/live", live),
        Route("/health/ready", ready),
        Route("/version", show_version),
    ]


def _answer(status: int, content: dict[str, Any]) -> Response:
    headers = {"Retry-After": str(RETRY_SECONDS)} if status == 503 else None
    return Response(
        msgspec.json.encode(content), status, headers=headers, media_type="application/json"
    )
