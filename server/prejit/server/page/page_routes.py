"""The routes of the page: its files, and two endpoints of JSON that only the page reads."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from prejit.server.page.page_figures import figures_of, models_of
from prejit.server.served.work_threads import OPERATORS, in_thread

if TYPE_CHECKING:
    from prejit.server.served.served import Models

_FILES = {
    "/": ("index.html", "text/html"),
    "/page/style.css": ("style.css", "text/css"),
    "/page/script.js": ("script.js", "text/javascript"),
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
}
_HEADERS = {
    # Nothing but the files of this server, and no code inside the HTML: text of a model cannot become code.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # a newer prejit at the same address has newer files
}


def routes(models: Models) -> list[Route]:
    """Return the routes of the page.

    Args:
        models: the served bundles; more may be added later.
    """

    async def loaded(request: Request) -> Response:
        # In a thread, because a report waits while a program is being loaded.
        served = await in_thread(OPERATORS, lambda: models_of(models))
        return _json({"state": models.state, "models": served})

    async def figures(request: Request) -> Response:
        measured = await in_thread(OPERATORS, lambda: figures_of(models))
        return _json({"state": models.state, "models": measured})

    return [
        *(_file(path, *described) for path, described in _FILES.items()),
        Route("/page/models", loaded),
        Route("/page/figures", figures),
    ]


def _file(path: str, name: str, media_type: str) -> Route:
    content = files("prejit.server.page").joinpath(name).read_bytes()

    async def send(request: Request) -> Response:
        return Response(content, headers=_HEADERS, media_type=media_type)

    return Route(path, send)


def _json(value: object) -> Response:
    headers = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
    return Response(msgspec.json.encode(value), headers=headers, media_type="application/json")
