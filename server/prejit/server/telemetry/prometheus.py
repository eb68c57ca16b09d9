"""`/metrics` for Prometheus."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from prejit.server.served.work_threads import OPERATORS, in_thread

if TYPE_CHECKING:
    from prejit.server.served.served import Models
    from prejit.server.telemetry.metrics_collector import Exposition


def routes(models: Models) -> list[Route]:
    """Return the route of `/metrics`. It answers while bundles load, too."""

    @cache
    def exposition() -> Exposition:
        # The package takes 30 ms to import, and the first scrape is not in the way of a start.
        from prejit.server.telemetry.metrics_collector import Exposition

        return Exposition(models)

    async def show(request: Request) -> Response:
        accept = request.headers.get("accept", "")
        page, content_type = await in_thread(OPERATORS, lambda: exposition().page(accept))
        return Response(page, headers={"content-type": content_type})

    return [Route("/metrics", show)]
