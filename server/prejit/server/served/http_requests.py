"""Counts of HTTP requests to models: what clients asked for, and how each was answered."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING, final

from starlette.routing import Match

from prejit.server.engine.histograms import REQUEST_BOUNDS, Histogram, HistogramValue

if TYPE_CHECKING:
    from starlette.types import Scope

OTHER = "other"
"""The route of requests to paths that the server does not have: clients must not make names of series."""


@final
class HttpRequests:
    """Counts answers by route and status, and how long they took. Safe to use from many threads."""

    def __init__(self) -> None:
        """Begin with nothing counted."""
        self._lock = threading.Lock()
        self._answers: Counter[tuple[str, int]] = Counter()
        self._seconds: dict[str, Histogram] = {}

    def answered(self, scope: Scope, status: int, seconds: float) -> None:
        """Count a request that has its whole answer.

        Args:
            scope: of the request.
            status: of the answer; 0: its client went before it began.
            seconds: how long it took.
        """
        route = _route(scope)
        with self._lock:
            self._answers[route, status] += 1
            self._seconds.setdefault(route, Histogram(REQUEST_BOUNDS)).observe(seconds)

    def snapshot(self) -> tuple[dict[tuple[str, int], int], dict[str, HistogramValue]]:
        """Return the number of answers by route and status, and their times by route."""
        with self._lock:
            seconds = {route: each.snapshot() for route, each in self._seconds.items()}
            return dict(self._answers), seconds


def _route(scope: Scope) -> str:
    """Return the path of a request as the routes have it, `/v2/models/{model}/infer`."""
    for route in scope["app"].routes:
        if route.matches(scope)[0] is not Match.NONE:
            return str(route.path)
    return OTHER
