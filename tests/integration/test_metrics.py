"""Metrics of real engines and real servers: what is counted is what callers got."""

from __future__ import annotations

import signal
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.parser import text_string_to_metric_families
from tests.integration.test_serve import Process

from prejit.runtime import load
from prejit.server.engine.engine import Engine
from prejit.server.served.served import Models, Served
from prejit.server.telemetry.metrics_collector import Exposition

PROMPTS = ([number % 48 for number in range(40)], [7, 8], [1, 2, 3, 4, 9, 10])
TRACE = "0af7651916cd43dd8448eb211c80319c"


def values(page):
    """Return each sample of a page by its name and its labels, without those of the bundle."""
    return {
        (
            sample.name,
            frozenset(
                (key, value)
                for key, value in sample.labels.items()
                if key not in ("model_name", "engine", "kind", "program")
            ),
        ): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def test_metrics_are_the_sums_of_what_callers_got(decoder_dir):
    bundle = load(decoder_dir, on_mismatch="error")
    engine = Engine(bundle, slots=3, queue=8)
    try:
        options = {"max_new_tokens": 6, "stop_token_ids": ()}
        results = [future.result() for future in [engine.submit(p, **options) for p in PROMPTS]]
        # Nobody else runs, so the slot that has this prompt now takes it again.
        results += [engine.generate(PROMPTS[0], **options) for _ in range(2)]
        *_, last = engine.stream(PROMPTS[1], **options)
        stats = [*(result.stats for result in results), last.stats]
        exposition = Exposition(Models(Served("demo", bundle, engine, 0)))
        page, _ = exposition.page("")
        found = values(page.decode())

        def value(name, **labels):
            return found[name, frozenset(labels.items())]

        assert value("vllm:prompt_tokens_total") == sum(one.prompt_tokens for one in stats)
        assert value("vllm:generation_tokens_total") == sum(one.new_tokens for one in stats) == 36
        cached = sum(one.reused_tokens for one in stats)
        assert value("vllm:prefix_cache_hits_total") == cached > 0
        assert value("vllm:request_success_total", finished_reason="length") == 6
        assert value("prejit_requests_total", reason="length") == 6
        assert value("vllm:num_requests_running") == value("vllm:num_requests_waiting") == 0
        assert value("vllm:time_to_first_token_seconds_count") == 6
        # 36 tokens, and the first ones of 6 requests have none before them.
        assert value("vllm:inter_token_latency_seconds_count") == 30
        assert value("vllm:time_to_first_token_seconds_sum") == pytest.approx(
            sum(one.first_token_seconds for one in stats), rel=0.5, abs=0.05
        )
        assert 'target="cpu-host"' in page.decode()
        assert bundle.digest in page.decode()
    finally:
        engine.close()


class Collector(HTTPServer):
    """A collector of OpenTelemetry, which keeps what it gets."""

    def __init__(self):
        self.traces = []
        self.metrics = []
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    def spans(self):
        resources = [one for trace in self.traces for one in trace.resource_spans]
        named = [pair for one in resources for pair in one.resource.attributes]
        services = {pair.value.string_value for pair in named if pair.key == "service.name"}
        assert services == {"prejit"}
        return [span for one in resources for scope in one.scope_spans for span in scope.spans]

    def names(self):
        resources = [one for each in self.metrics for one in each.resource_metrics]
        scopes = [scope for one in resources for scope in one.scope_metrics]
        return {metric.name for scope in scopes for metric in scope.metrics}


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.path == "/v1/traces":
            self.server.traces.append(ExportTraceServiceRequest.FromString(body))
        else:
            self.server.metrics.append(ExportMetricsServiceRequest.FromString(body))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *arguments):
        pass


@pytest.fixture
def collector():
    with Collector() as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def test_a_server_is_scraped_and_sends_traces(decoder_dir, collector):
    options = ("--slots", "3", "--prefix-memory", "2M")
    server = Process(decoder_dir, *options, OTEL_EXPORTER_OTLP_ENDPOINT=collector.url)
    try:
        server.wait_until_ready()
        body = {"model": "decoder", "prompt": [1, 2, 3], "max_tokens": 4}
        parent = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
        whole = httpx.post(f"{server.url}/v1/completions", json=body, headers=parent, timeout=60)
        assert whole.status_code == 200, whole.text
        streamed = httpx.post(
            f"{server.url}/v1/completions", json={**body, "stream": True}, timeout=60
        )
        assert streamed.text.endswith("data: [DONE]\n\n")
        page = httpx.get(f"{server.url}/metrics", timeout=60)
        assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
        found = values(page.text)
        assert found["vllm:time_to_first_token_seconds_count", frozenset()] == 2
        assert found["prejit_server_state", frozenset({("state", "ready")})] == 1
        budgets = {value for (name, _), value in found.items() if "prefix_cache_budget" in name}
        assert budgets == {2 << 20}
        assert server.end(signal.SIGTERM) == 0
    finally:
        server.kill()
    spans = collector.spans()
    names = {span.name for span in spans}
    assert {"text_completion decoder", "queue", "prefill", "decode"} <= names
    of_trace = [span for span in spans if span.trace_id.hex() == TRACE]
    (root,) = [span for span in of_trace if span.name == "text_completion decoder"]
    assert root.parent_span_id.hex() == "b7ad6b7169203331"
    assert "gen_ai.server.time_to_first_token" in collector.names()
