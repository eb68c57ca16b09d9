"""Spans and metrics of requests, by OpenTelemetry's semantic conventions for generative AI.

    chat demo                       one span for each request, a child of the client's (traceparent)
      queue  prefill  decode        for each generation: `n` of them have the same parent
      encode  call                  for calls of an encoder and of functions

The handlers of requests do not call it: `Telemetry.watch` watches each engine, and finds the request by a
context variable. The conventions: https://opentelemetry.io/docs/specs/semconv/gen-ai/.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

from opentelemetry import propagate
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context

from prejit.server.engine.engine_metrics import TOKEN_BOUNDS
from prejit.server.telemetry.watched_engine import EngineCall, Watch

if TYPE_CHECKING:
    from opentelemetry.metrics import Histogram
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.util.types import AttributeValue
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from prejit.runtime.generation.finished_text import Stats

_OPERATIONS = (
    (re.compile(r"/v1/chat/completions|/v1/responses"), "chat"),
    (re.compile(r"/v1/completions"), "text_completion"),
    (re.compile(r"/v1/embeddings|(/v[12])?/(score|rerank)"), "embeddings"),
    (re.compile(r"/v2/models/.+/infer"), "infer"),
)
"""The operation of each path that is traced. `infer` is no name of the conventions: they have none for it."""

_OPTIONS = {
    "max_new_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "seed": "gen_ai.request.seed",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
}
"""Options of a generation and the attributes that show them."""

_PROVIDER = "prejit"

# The bounds that the conventions recommend. For tokens also finer ones, because small models need them.
_DURATIONS = tuple(0.01 * 2**power for power in range(14))
_FIRST_TOKENS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
_TOKENS = tuple(bound for bound in TOKEN_BOUNDS if bound <= 2.5)
_COUNTS = tuple(float(4**power) for power in range(14))


@dataclass(slots=True)
class _Request:
    """A request on its way.

    Attributes:
        operation: its operation.
        span: its span.
        model: the served name; empty until an engine is called.
        input_tokens, cached_tokens, output_tokens: sums over its generations.
        reasons: why its generations ended.
    """

    operation: str
    span: Span
    model: str = ""
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasons: list[str] = field(default_factory=list)


_current: ContextVar[_Request | None] = ContextVar("_current", default=None)
"""The request whose handler runs."""


@final
class Telemetry:
    """Records spans and metrics, and gives them to what exports them."""

    def __init__(self, tracers: TracerProvider, meters: MeterProvider) -> None:
        """Record to these providers. `close` ends them."""
        self._providers = (tracers, meters)
        self._tracer = tracers.get_tracer("prejit")
        meter = meters.get_meter("prejit")

        def histogram(name: str, unit: str, text: str, bounds: Sequence[float]) -> Histogram:
            return meter.create_histogram(
                name, unit, text, explicit_bucket_boundaries_advisory=bounds
            )

        whole = "Time from a request to the end of its response."
        self._duration = histogram("gen_ai.server.request.duration", "s", whole, _DURATIONS)
        first = "Time from a request to its first token."
        self._first_token = histogram(
            "gen_ai.server.time_to_first_token", "s", first, _FIRST_TOKENS
        )
        each = "Time per token after the first."
        self._token = histogram("gen_ai.server.time_per_output_token", "s", each, _TOKENS)
        count = "Tokens of prompts and new tokens."
        self._usage = histogram("gen_ai.client.token.usage", "{token}", count, _COUNTS)

    def app(self, app: Any) -> ASGIApp:
        """Return an application that opens a span for each request to a model.

        Args:
            app: any application of ASGI 3. uvicorn and Starlette have different types for it.
        """

        async def traced(scope: Scope, receive: Receive, send: Send) -> None:
            operation = _operation(scope)
            if operation is None:
                await app(scope, receive, send)
            else:
                await self._trace(operation, app, scope, receive, send)

        return traced

    def watch(self, call: EngineCall) -> Watch | None:
        """Return what makes spans of a call of an engine, below that of the request that makes it."""
        if (request := _current.get()) is None:
            return None
        request.model, submitted = call.model, time.time_ns()
        if request.span.is_recording():
            for name, attribute in _OPTIONS.items():
                if isinstance(value := call.options.get(name), int | float):
                    request.span.set_attribute(attribute, value)

        def watch(found: Any) -> None:
            if call.kind == "encode":
                self._ran(request, call.kind, submitted, found.stats.tokens)
            elif call.kind == "call":
                self._ran(request, f"call {call.program}", submitted, 0)
            elif found.finish_reason is not None and found.stats is not None:
                self._generated(request, submitted, found.finish_reason, found.stats)

        return watch

    def close(self) -> None:
        """Export what is left, and end."""
        for provider in self._providers:
            provider.shutdown()

    async def _trace(
        self, operation: str, app: ASGIApp, scope: Scope, receive: Receive, send: Send
    ) -> None:
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        span = self._tracer.start_span(
            operation,
            propagate.extract(headers),
            SpanKind.SERVER,
            {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": _PROVIDER,
                "http.request.method": scope["method"],
                "url.path": scope["path"],
            },
        )
        request = _Request(operation, span)
        token = _current.set(request)
        started = time.perf_counter()
        status, is_whole = 0, False

        async def watched(message: Message) -> None:
            nonlocal status, is_whole
            if message["type"] == "http.response.start":
                status = message["status"]
                for key, value in message.get("headers", ()):
                    if key == b"x-request-id":
                        span.set_attribute("gen_ai.response.id", value.decode("latin-1"))
            elif message["type"] == "http.response.body":
                is_whole = not message.get("more_body", False)
            await send(message)

        try:
            await app(scope, receive, watched)
        finally:
            _current.reset(token)
            self._end(request, time.perf_counter() - started, status, is_whole)

    def _end(self, request: _Request, seconds: float, status: int, is_whole: bool) -> None:
        """End the span of a request, and record its metrics."""
        attributes = self._attributes(request.operation, request.model)
        span = request.span
        span.set_attributes(attributes)
        if request.model:
            span.update_name(f"{request.operation} {request.model}")
        if status:
            span.set_attribute("http.response.status_code", status)
        error = str(status) if status >= 400 else "" if is_whole else "incomplete"
        if error:
            attributes["error.type"] = error
            span.set_attribute("error.type", error)
        if status >= 500 or error == "incomplete":
            span.set_status(Status(StatusCode.ERROR))
        if request.reasons:
            span.set_attribute("gen_ai.response.finish_reasons", request.reasons)
        if request.input_tokens:
            span.set_attribute("gen_ai.usage.input_tokens", request.input_tokens)
            span.set_attribute("gen_ai.usage.cache_read.input_tokens", request.cached_tokens)
            span.set_attribute("gen_ai.usage.output_tokens", request.output_tokens)
            self._count("input", request.input_tokens, attributes)
            self._count("output", request.output_tokens, attributes)
        self._duration.record(seconds, attributes)
        span.end()

    def _count(self, kind: str, tokens: int, attributes: Mapping[str, AttributeValue]) -> None:
        if tokens:
            self._usage.record(tokens, {**attributes, "gen_ai.token.type": kind})

    @staticmethod
    def _attributes(operation: str, model: str) -> dict[str, AttributeValue]:
        named = {"gen_ai.request.model": model, "gen_ai.response.model": model} if model else {}
        return {"gen_ai.operation.name": operation, "gen_ai.provider.name": _PROVIDER, **named}

    def _generated(self, request: _Request, submitted: int, reason: str, stats: Stats) -> None:
        """Record a generation that has ended, and was submitted at a time in nanoseconds since 1970."""
        request.reasons.append(reason)
        request.input_tokens += stats.prompt_tokens
        request.cached_tokens += stats.reused_tokens
        request.output_tokens += stats.new_tokens
        attributes = self._attributes(request.operation, request.model)
        self._first_token.record(stats.first_token_seconds, attributes)
        if stats.tokens_per_second:
            self._token.record(1 / stats.tokens_per_second, attributes)
        if not request.span.is_recording():
            return
        admitted = submitted + round(stats.queue_seconds * 1e9)
        first = max(admitted, submitted + round(stats.first_token_seconds * 1e9))
        self._child(request, "queue", submitted, admitted, {})
        self._child(
            request,
            "prefill",
            admitted,
            first,
            {
                "gen_ai.usage.input_tokens": stats.prompt_tokens,
                "gen_ai.usage.cache_read.input_tokens": stats.reused_tokens,
                "prejit.prefill_seconds": stats.prefill_seconds,
            },
        )
        self._child(
            request,
            "decode",
            first,
            time.time_ns(),
            {
                "gen_ai.usage.output_tokens": stats.new_tokens,
                "gen_ai.response.finish_reasons": [reason],
                "prejit.decode_seconds": stats.decode_seconds,
                "prejit.padding": stats.padding,
                "prejit.programs": list(stats.programs),
                "prejit.compiled": [
                    one.program for one in stats.obtained if one.source == "compiled"
                ],
            },
        )

    def _ran(self, request: _Request, name: str, submitted: int, tokens: int) -> None:
        """Record a call of an encoder or a function that has ended, and read so many tokens."""
        request.input_tokens += tokens
        if request.span.is_recording():
            self._child(request, name, submitted, time.time_ns(), {})

    def _child(
        self,
        request: _Request,
        name: str,
        start: int,
        end: int,
        attributes: Mapping[str, AttributeValue],
    ) -> None:
        parent = set_span_in_context(request.span)
        span = self._tracer.start_span(name, parent, attributes=attributes, start_time=start)
        span.end(max(start, end))


def _operation(scope: Scope) -> str | None:
    if scope["type"] != "http" or scope["method"] != "POST":
        return None
    for pattern, operation in _OPERATIONS:
        if pattern.fullmatch(scope["path"]):
            return operation
    return None
