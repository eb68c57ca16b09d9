"""The application of the server: its routes, its errors, and the gate that every request passes."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from prejit.server.gate import http_errors
from prejit.server.gate.gate import Gate
from prejit.server.gate.server_settings import Settings
from prejit.server.http import health
from prejit.server.http.operations import OPERATIONS
from prejit.server.inference import inference_routes as inference
from prejit.server.openai import openai_routes as openai
from prejit.server.openai.openapi import openapi_route
from prejit.server.page import page_routes as page
from prejit.server.served.served import Models
from prejit.server.telemetry import prometheus


def make_app(models: Models, settings: Settings) -> Starlette:
    """Return the ASGI application of a server.

    Args:
        models: the served bundles; more may be added later.
        settings: its limits.
    """
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
            *health.routes(models),
            *inference.routes(models, settings),
            *openai.routes(models, settings),
            openapi_route(OPERATIONS),
            *prometheus.routes(models),
            *page.routes(models),
        ],
        middleware=middleware,
        # Starlette answers its own HTTPException in its own form; all other errors reach the gate.
        exception_handlers={HTTPException: http_errors.handle},
    )
