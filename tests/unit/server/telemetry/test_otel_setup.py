"""Traces and metrics of OpenTelemetry: a span without its parent, or a wrong time, misleads people."""

import asyncio
import json
import os
import subprocess
import sys

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route
from starlette.testclient import TestClient
from tests.served import StandIn

from prejit.runtime.errors import UsageError
from prejit.server.engine.fair_queue import NO_LIMITS
from prejit.server.telemetry import otel_setup
from prejit.server.telemetry.spans import Telemetry
from prejit.server.telemetry.watched_engine import WatchedEngine

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Recorded:
    def __init__(self, handler):
        self.exporter = InMemorySpanExporter()
        self.reader = InMemoryMetricReader()
        tracers = TracerProvider()
        tracers.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.telemetry = Telemetry(tracers, MeterProvider([self.reader]))
        stand_in = StandIn()
        engine = WatchedEngine("demo", stand_in, self.telemetry.watch)

        async def handle(request):
            return await handler(engine, request)

        paths = ("chat/completions", "completions", "embeddings")
        paths = ("/metrics", "/v2/models/score/infer", *(f"/v1/{path}" for path in paths))
        app = Starlette(routes=[Route(path, handle, methods=["GET", "POST"]) for path in paths])
        self.client = TestClient(self.telemetry.app(app), raise_server_exceptions=False)

    def post(self, path="/v1/chat/completions", **headers):
        return self.client.post(path, headers=headers, json={})

    def spans(self):
        return {span.name: span for span in self.exporter.get_finished_spans()}

    def points(self):
        data = self.reader.get_metrics_data()
        return {
            metric.name: list(metric.data.data_points)
            for resource in ([] if data is None else data.resource_metrics)
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }


async def generate(engine, request):
    options = {"max_new_tokens": 3, "temperature": 0.5, "client": "", "seed": None}
    result = await asyncio.wrap_future(engine.submit("hello", **options))
    return PlainTextResponse(result.text, headers={"x-request-id": "id-7"})


async def stream(engine, request):
    async def pieces():
        async for piece in engine.stream("hello"):
            yield piece.text

    return StreamingResponse(pieces())


def test_a_request_is_one_span_below_that_of_its_client_with_three_parts():
    recorded = Recorded(generate)
    recorded.client.get("/metrics")
    recorded.client.get("/v1/chat/completions")
    assert "chat demo" not in recorded.spans()  # what is no request to a model is not traced
    assert recorded.points() == {}
    recorded = Recorded(generate)
    assert recorded.post(traceparent=f"00-{TRACE}-{PARENT}-01").text == "abc"
    spans = recorded.spans()
    assert spans.keys() == {"chat demo", "queue", "prefill", "decode"}
    whole = spans["chat demo"]
    assert whole.kind is SpanKind.SERVER
    assert f"{whole.parent.span_id:016x}" == PARENT
    for name in ("queue", "prefill", "decode"):
        assert f"{spans[name].context.trace_id:032x}" == TRACE
        assert spans[name].parent.span_id == whole.context.span_id
    gen_ai = {
        **{"operation.name": "chat", "provider.name": "prejit", "request.model": "demo"},
        **{"response.model": "demo", "request.max_tokens": 3, "request.temperature": 0.5},
        **{"response.id": "id-7", "response.finish_reasons": ("length",)},
        **{"usage.input_tokens": 5, "usage.cache_read.input_tokens": 2, "usage.output_tokens": 3},
    }
    assert dict(whole.attributes) == {
        **{f"gen_ai.{name}": value for name, value in gen_ai.items()},
        **{"http.request.method": "POST", "http.response.status_code": 200},
        "url.path": "/v1/chat/completions",
    }
    assert whole.status.status_code is StatusCode.UNSET
    queue, prefill, decode = (spans[name] for name in ("queue", "prefill", "decode"))
    assert queue.end_time - queue.start_time == 100_000_000
    assert prefill.end_time - prefill.start_time == 20_000_000
    assert (prefill.start_time, decode.start_time) == (queue.end_time, prefill.end_time)
    assert decode.end_time >= decode.start_time
    assert decode.attributes["prejit.programs"] == ("prefill_8x16", "decode_8x128")
    points = recorded.points()
    first = points["gen_ai.server.time_to_first_token"][0]
    assert first.sum == pytest.approx(0.12)
    assert dict(first.attributes)["gen_ai.request.model"] == "demo"
    assert points["gen_ai.server.time_per_output_token"][0].sum == pytest.approx(0.02)
    [duration] = points["gen_ai.server.request.duration"]
    assert (duration.count, duration.explicit_bounds[:3]) == (1, (0.01, 0.02, 0.04))
    assert duration.sum > 0
    usage = points["gen_ai.client.token.usage"]
    sums = {dict(point.attributes)["gen_ai.token.type"]: point.sum for point in usage}
    assert sums == {"input": 5, "output": 3}


async def two(engine, request):
    await asyncio.wrap_future(engine.submit("hello"))
    return await stream(engine, request)


async def encode(engine, request):
    await asyncio.wrap_future(engine.submit_encode(["a"]))
    return PlainTextResponse("")


async def call(engine, request):
    future = engine.submit_client_call("", NO_LIMITS, "score", 1)
    return PlainTextResponse(await asyncio.wrap_future(future))


def test_generations_add_up_streams_are_traced_to_their_ends_and_other_calls_have_a_span():
    recorded = Recorded(two)
    assert recorded.post("/v1/completions").text == "abc"
    whole = recorded.spans()["text_completion demo"]
    assert whole.attributes["gen_ai.usage.output_tokens"] == 6
    assert whole.attributes["gen_ai.response.finish_reasons"] == ("length", "length")
    names = [span.name for span in recorded.exporter.get_finished_spans()]
    assert names.count("decode") == 2
    recorded = Recorded(encode)
    recorded.post("/v1/embeddings")
    assert recorded.spans().keys() == {"embeddings demo", "encode"}
    assert recorded.spans()["embeddings demo"].attributes["gen_ai.usage.input_tokens"] == 7
    recorded = Recorded(call)
    assert recorded.post("/v2/models/score/infer").text == "score"
    assert recorded.spans().keys() == {"infer demo", "call score"}


async def fail(engine, request):
    await asyncio.wrap_future(engine.submit("hello", error=RuntimeError("broken")))


async def refuse(engine, request):
    return PlainTextResponse("", 400)


async def break_off(engine, request):
    async def pieces():
        yield "a"
        raise RuntimeError("broken")

    return StreamingResponse(pieces())


@pytest.mark.parametrize(
    ("handler", "kind", "status"),
    [
        (fail, "500", StatusCode.ERROR),
        (refuse, "400", StatusCode.UNSET),  # no error of the server
        (break_off, "incomplete", StatusCode.ERROR),
    ],
)
def test_an_error_is_one_of_the_span_and_of_the_metrics(handler, kind, status):
    recorded = Recorded(handler)
    recorded.post()
    [whole] = recorded.exporter.get_finished_spans()
    assert whole.status.status_code is status
    assert whole.attributes["error.type"] == kind
    assert "gen_ai.usage.input_tokens" not in whole.attributes
    [point] = recorded.points()["gen_ai.server.request.duration"]
    assert dict(point.attributes)["error.type"] == kind


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)


ENDPOINT, NOWHERE = "OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9"


def test_without_variables_that_ask_for_it_nothing_is_imported():
    script = (
        "import json, os, sys; from prejit.server.telemetry import otel_setup\n"
        "for each in json.loads(sys.argv[1]):\n"
        "    os.environ.update(each); assert otel_setup.start() is None\n"
        "    for name in each: del os.environ[name]\n"
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    none = {"OTEL_TRACES_EXPORTER": "none", "OTEL_METRICS_EXPORTER": "none", ENDPOINT: NOWHERE}
    disabled = {"OTEL_SDK_DISABLED": "true", ENDPOINT: NOWHERE}
    quiet = [{}, disabled, none, {"OTEL_SERVICE_NAME": "web"}]
    assert subprocess.run([sys.executable, "-c", script, json.dumps(quiet)]).returncode == 0


def test_what_is_not_supported_or_not_installed_is_said_at_the_start(monkeypatch):
    for name, value, expected in (
        ("OTEL_TRACES_EXPORTER", "zipkin", "otlp, console, none"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "http/protobuf"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(ENDPOINT, NOWHERE)
            patch.setenv(name, value)
            with pytest.raises(UsageError, match=expected) as caught:
                otel_setup.start()
            assert name in str(caught.value)
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(UsageError, match="not installed") as caught:
        otel_setup.start()
    assert "prejit[otel]" in caught.value.hint
