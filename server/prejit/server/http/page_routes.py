"""The routes of the page: its files, and two endpoints of JSON that only the page reads."""

from __future__ import annotations

import math
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from prejit.runtime.programs.usage_hint import functions_of
from prejit.server.inference.inference_models import static_values
from prejit.server.openai.models_and_tokens import longest
from prejit.server.served.work_threads import OPERATORS, in_thread

if TYPE_CHECKING:
    from prejit.server.engine.engine_metrics import EngineMetrics, HistogramValue, RequestMetrics
    from prejit.server.served.served import Models, Served

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
_FIGURES = (
    *("running", "waiting", "slots", "generation_tokens", "prompt_tokens", "cached_prompt_tokens"),
    *("kv_cache_usage", "cache_bytes", "host_memory_bytes", "device_memory_bytes"),
)
"""Figures of an engine that the page gets as they are."""


def routes(models: Models) -> list[Route]:
    """Return the routes of the page. More bundles may be added to the models later."""

    async def loaded(request: Request) -> Response:
        # In a thread, because a report waits while a program is being loaded.
        served = await in_thread(OPERATORS, lambda: [_model(one) for one in models])
        return _json({"state": models.state, "models": served})

    async def figures(request: Request) -> Response:
        measured = await in_thread(
            OPERATORS, lambda: {one.name: _figures(one.engine.metrics()) for one in models}
        )
        return _json({"state": models.state, "models": measured})

    return [
        *(_file(path, *described) for path, described in _FILES.items()),
        Route("/page/models", loaded),
        Route("/page/figures", figures),
    ]


def _file(path: str, name: str, media_type: str) -> Route:
    content = files("prejit.server.http").joinpath("page", name).read_bytes()

    async def send(request: Request) -> Response:
        return Response(content, headers=_HEADERS, media_type=media_type)

    return Route(path, send)


def _json(value: object) -> Response:
    headers = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
    return Response(msgspec.json.encode(value), headers=headers, media_type="application/json")


def _model(one: Served) -> dict[str, Any]:
    """Return what the page shows of a served bundle, and what it can do with it."""
    bundle = one.bundle
    functions = functions_of(bundle.config.programs)
    decoder, encoder = bundle.config.decoder, bundle.config.encoder
    has_decoder = decoder is not None and decoder.source is None
    embeds = encoder is not None and encoder.scores is None
    return {
        "name": one.name,
        "bundle": bundle.name,
        "digest": bundle.digest,
        "target": bundle.target,
        "matched": bundle.matched,
        "versions": dict(sorted(bundle.config.versions.items())),
        "load_seconds": bundle.load_seconds,
        "chat": has_decoder and bundle.has_tokenizer and bundle.has_chat_template,
        "complete": has_decoder and bundle.has_tokenizer,
        "embed": embeds and bundle.has_tokenizer,
        "max_tokens": longest(one) or None,
        "calls": sorted(functions),
        "static": {name: static_values(buckets) for name, buckets in functions.items()},
        "programs": [
            {"program": each.program, "source": each.source, "seconds": each.seconds}
            for each in bundle.report()
        ],
    }


def _figures(metrics: EngineMetrics) -> dict[str, Any]:
    """Return the figures of an engine as the page draws them; None: there was no value yet."""
    return {
        **{name: getattr(metrics, name) for name in _FIGURES},
        "queue_size": sum(each.queue_size for each in metrics.requests),
        "first_token_p50": _quantile(metrics.first_token_seconds, 0.5),
        "first_token_p95": _quantile(metrics.first_token_seconds, 0.95),
        "inter_token_p50": _quantile(metrics.inter_token_seconds, 0.5),
        "inter_token_p95": _quantile(metrics.inter_token_seconds, 0.95),
        **_times(metrics),
        "finished": sum(each.succeeded for each in metrics.requests),
        "failed": sum(each.failed for each in metrics.requests),
        "waited_for_compile": sum(each.waited_for_compile for each in metrics.requests),
        "programs": dict(metrics.programs),
        "calls": [_calls(each) for each in metrics.requests if each.kind != "generate"],
    }


def _calls(requests: RequestMetrics) -> dict[str, Any]:
    useful, computed = requests.useful_positions, requests.computed_positions
    if not computed:  # a function, which has no tokens
        useful, computed = requests.rows, requests.rows + requests.padded_rows
    return {
        "program": requests.program,
        "finished": requests.succeeded,
        "failed": requests.failed,
        **_times(requests),
        "rows_per_run": requests.rows / requests.runs if requests.rows else None,
        "padding": 1 - useful / computed if computed else None,
    }


def _times(metrics: EngineMetrics | RequestMetrics) -> dict[str, float | None]:
    return {
        "whole_p50": _quantile(metrics.whole_seconds, 0.5),
        "whole_p95": _quantile(metrics.whole_seconds, 0.95),
        "queue_p95": _quantile(metrics.queue_seconds, 0.95),
    }


def _quantile(histogram: HistogramValue, share: float) -> float | None:
    value = histogram.quantile(share)
    return None if math.isnan(value) else value
