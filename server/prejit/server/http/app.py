"""The application of the server: all routes, errors, the gate; /health, /version and /metrics themselves."""

from __future__ import annotations

from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from prejit.server.gate import http_errors
from prejit.server.gate.gate import Gate
from prejit.server.gate.http_errors import RETRY_SECONDS, json_response
from prejit.server.gate.server_settings import Settings
from prejit.server.http import page_routes as page
from prejit.server.inference import inference_routes as inference
from prejit.server.inference.inference_routes import OPERATIONS as OF_INFERENCE
from prejit.server.openai import openai_routes as openai
from prejit.server.openai.openai_routes import OPERATIONS as OF_OPENAI
from prejit.server.openai.openapi import Operation, openapi_route
from prejit.server.served.served import Models
from prejit.server.served.work_threads import OPERATORS, in_thread

if TYPE_CHECKING:
    from prejit.server.telemetry.metrics_collector import Exposition


_OF_SERVER = (
    Operation("get", "/health/live", "Say that the process runs"),
    Operation("get", "/health/ready", "Say whether the server takes requests"),
    Operation("get", "/health", "Say whether the server takes requests"),
    Operation("get", "/version", "Return the version of prejit"),
    Operation("get", "/metrics", "Return figures for Prometheus", media_type="text/plain"),
)

OPERATIONS = (*OF_OPENAI, *_OF_SERVER, *OF_INFERENCE)
"""All routes but those of the page, and the paths of the inference protocol that name a version."""


def operator_routes(models: Models) -> list[Route]:
    """Return the routes for those who run servers. They answer while bundles load, too."""

    async def live(request: Request) -> Response:
        return json_response({"state": models.state})

    async def ready(request: Request) -> Response:
        described: dict[str, Any] = {"state": models.state, "models": [one.name for one in models]}
        if sleeping := [one.name for one in models if one.is_sleeping]:
            described["sleeping"] = sleeping  # a request wakes one
        if models.wrong:
            described["wrong_answers"] = dict(models.wrong)
        if models.is_ready:
            return json_response(described)
        return json_response(described, 503, {"Retry-After": str(RETRY_SECONDS)})

    async def show_version(request: Request) -> Response:
        return json_response({"version": version("prejit")})

    @cache
    def exposition() -> Exposition:
        # The package takes 30 ms to import, and the first scrape is not in the way of a start.
        from prejit.server.telemetry.metrics_collector import Exposition

        return Exposition(models)

    async def metrics(request: Request) -> Response:
        accept = request.headers.get("accept", "")
        page, content_type = await in_thread(OPERATORS, lambda: exposition().page(accept))
        return Response(page, headers={"content-type": content_type})

    return [
        Route("/health", ready),
        Route("/health/live", live),
        Route("/health/ready", ready),
        Route("/version", show_version),
        Route("/metrics", metrics),
    ]


def make_app(models: Models, settings: Settings) -> Starlette:
    """Return the ASGI application of a server. More bundles may be added to its models later."""
    middleware = [Middleware(Gate, models=models, settings=settings)]
    if settings.cors:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=settings.cors,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            allow_private_network=True,
            expose_headers=("Retry-After", "X-Request-Id"),
        )
        middleware.insert(0, cors)  # browsers ask without a key, and errors need its headers too
    return Starlette(
        routes=[
            *operator_routes(models),
            *inference.routes(models, settings),
            *openai.routes(models, settings),
            openapi_route(OPERATIONS),
            *page.routes(models),
        ],
        middleware=middleware,
        # Starlette answers its own HTTPException in its own form; all other errors reach the gate.
        exception_handlers={HTTPException: http_errors.handle},
    )
