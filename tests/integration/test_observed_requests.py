"""Whoever watches a server sees every request, and why it failed: decoders, encoders and functions."""

import dataclasses
import signal
from contextlib import contextmanager

import httpx
import jax.numpy as jnp
import numpy as np
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.parser import text_string_to_metric_families
from tests.http_serving import QuietHandler, serving
from tests.unit.runtime.test_fallback import v2_machine
from tests.unit.server.running import running, wait_for

from prejit.compiler import Program
from prejit.runtime import FallbackWarning, load
from prejit.runtime.encoding.encoder import EncoderPrograms
from prejit.server.engine.engine import Engine
from prejit.server.gate.server_settings import Settings
from prejit.server.served.served import Models, Served

TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture(scope="module")
def functions_dir(build_programs):
    args = {"args": {"x": "float32[{batch}, 8]"}, "buckets": {"batch": [4]}, "pad": ["batch"]}
    doubled = Program("doubled", fn=lambda x: jnp.tanh(x) * 2, **args)
    return build_programs([doubled], "functions")


class Watched:
    """A server, and what it says of itself."""

    def __init__(self, url, engine=None):
        self.client = httpx.Client(base_url=url, timeout=60)
        self.engine = engine

    def statuses(self, path, *bodies):
        return [self.client.post(path, json=body).status_code for body in bodies]

    def value(self, name, **labels):
        """The sum of the samples with these labels."""
        families = text_string_to_metric_families(self.client.get("/metrics").text)
        found = [each for family in families for each in family.samples if each.name == name]
        assert found, name
        return sum(one.value for one in found if labels.items() <= one.labels.items())

    def answers(self):
        families = text_string_to_metric_families(self.client.get("/metrics").text)
        return {
            (one.labels["route"], one.labels["status"]): one.value
            for family in families
            for one in family.samples
            if one.name == "prejit_http_requests_total"
        }

    def figures(self):
        (found,) = self.client.get("/page/figures").json()["models"].values()
        return found


@contextmanager
def watched(name, path, **options):
    bundle = load(path, on_mismatch="error")
    engine = Engine(bundle, **options)
    models = Models(Served(name, bundle, engine, 1))
    with running(models, Settings()) as server:
        found = Watched(server.url, engine)
        yield found
        found.client.close()
    models.close()


@pytest.fixture
def encoder(encoder_dir):
    with watched("sentences", encoder_dir) as found:
        yield found


@pytest.fixture
def functions(functions_dir):
    with watched("functions", functions_dir) as found:
        yield found


def infer(rows, **changed):
    tensor = {"name": "x", "datatype": "FP32", "shape": [rows, 8], "data": [0.5] * rows * 8}
    return {"inputs": [tensor | changed]}


def test_metrics_of_a_decoder_are_the_sums_of_what_callers_got(decoder_dir):
    prompts = ([number % 48 for number in range(40)], [7, 8], [1, 2, 3, 4, 9, 10])
    with watched("demo", decoder_dir, slots=3, queue=8) as server:
        engine, options = server.engine, {"max_new_tokens": 6, "stop_token_ids": ()}
        results = [future.result() for future in [engine.submit(p, **options) for p in prompts]]
        # Nobody else runs, so the slot that has this prompt now takes it again.
        results += [engine.generate(prompts[0], **options) for _ in range(2)]
        *_, last = engine.stream(prompts[1], **options)
        stats = [*(result.stats for result in results), last.stats]
        for name, field in (
            *(("prompt_tokens", "prompt_tokens"), ("generation_tokens", "new_tokens")),
            ("prefix_cache_hits", "reused_tokens"),
        ):
            total = sum(getattr(one, field) for one in stats)
            assert server.value(f"vllm:{name}_total") == total > 0
        assert server.value("vllm:request_success_total", finished_reason="length") == 6
        assert server.value("prejit_requests_total", reason="length") == 6
        assert server.value("vllm:num_requests_running") == 0
        assert server.value("vllm:time_to_first_token_seconds_count") == 6
        # 36 tokens, and the first ones of 6 requests have none before them.
        assert server.value("vllm:inter_token_latency_seconds_count") == 30
        assert server.value("vllm:time_to_first_token_seconds_sum") == pytest.approx(
            sum(one.first_token_seconds for one in stats), rel=0.5, abs=0.05
        )


def test_requests_to_an_encoder_are_observed(encoder):
    assert encoder.value("prejit_requests_total", kind="encode") == 0  # rates are defined
    good = {"input": ["a b", "c d e"]}
    tokens = encoder.client.post("/v1/embeddings", json=good).json()["usage"]["total_tokens"]
    wrong = [{"input": []}, {"input": "a " * 600}, {"input": "a", "model": "other"}]
    assert encoder.statuses("/v1/embeddings", good, *wrong) == [200, 400, 400, 404]
    assert encoder.statuses("/v1/score", {"text_1": "a", "text_2": "b"}) == [200]
    assert encoder.statuses("/v1/rerank", {"query": "a", "documents": ["b", "c"]}) == [200]
    assert encoder.client.get("/nothing").status_code == 404
    assert encoder.client.get("/v1/embeddings").status_code == 405
    expected = {("/v1/embeddings", status): n for status, n in (("200", 2), ("400", 2))}
    expected |= {("/v1/embeddings", status): 1 for status in ("404", "405")}
    expected |= {("/v1/score", "200"): 1, ("/v1/rerank", "200"): 1, ("other", "404"): 1}
    wait_for(lambda: encoder.answers() == expected)
    assert encoder.value("prejit_http_request_seconds_count", route="/v1/embeddings") == 6
    program = {"kind": "encode", "program": "encode"}
    assert encoder.value("prejit_requests_total", **program, reason="done") == 4
    assert encoder.value("prejit_requests_total") == 4  # the wrong ones never reached the engine
    assert encoder.value("prejit_rows_total", **program) == 2 + 2 + 2 + 3
    assert encoder.value("prejit_runs_total", **program) == 4
    assert encoder.value("prejit_padded_rows_total", **program) == 4 * 4 - 9
    useful = encoder.value("prejit_useful_positions_total", **program)
    assert 2 * tokens < useful < encoder.value("prejit_computed_positions_total", **program)
    wait_for(lambda: encoder.value("prejit_device_busy_seconds_total", **program) > 0)
    assert encoder.value("vllm:prompt_tokens_total") == useful
    figures = encoder.figures()
    assert (figures["finished"], figures["failed"], figures["running"]) == (4, 0, 0)
    (calls,) = figures["calls"]
    assert (calls["program"], calls["finished"], calls["rows_per_run"]) == ("encode", 4, 9 / 4)


@pytest.mark.thorough
def test_requests_to_a_function_are_observed(functions):
    path = "/v2/models/doubled/infer"
    wrong = [infer(3, name="z"), infer(3, datatype="FP64"), {}]
    assert functions.statuses(path, infer(3), infer(6), *wrong) == [200, 200, 400, 400, 400]
    assert functions.statuses("/v2/models/other/infer", infer(3)) == [404]
    counts = {"200": 2, "400": 3, "404": 1}
    expected = {("/v2/models/{model}/infer", status): n for status, n in counts.items()}
    wait_for(lambda: functions.answers() == expected)
    program = {"kind": "call", "program": "doubled"}
    assert functions.value("prejit_requests_total", **program, reason="done") == 2
    assert functions.value("prejit_requests_total") == 2
    assert functions.value("prejit_rows_total", **program) == 3 + 6
    assert functions.value("prejit_runs_total", **program) == 1 + 2
    assert functions.value("prejit_padded_rows_total", **program) == 3 * 4 - 9
    (calls,) = functions.figures()["calls"]
    assert (calls["program"], calls["finished"], calls["rows_per_run"]) == ("doubled", 2, 3)
    assert calls["padding"] == pytest.approx(3 / 12)


def test_an_embedding_that_is_no_number_is_seen(encoder, monkeypatch):
    run = EncoderPrograms._run
    monkeypatch.setattr(EncoderPrograms, "_run", lambda *given: [np.nan * x for x in run(*given)])
    assert encoder.statuses("/v1/embeddings", {"input": "a"}) == [500]
    assert encoder.value("prejit_requests_total", kind="encode", reason="nan") == 1
    assert encoder.figures()["failed"] == 1


def test_a_call_that_waits_for_a_compiler_is_seen(functions_dir):
    with pytest.warns(FallbackWarning):
        bundle = load(functions_dir, fingerprint=v2_machine())
    engine = Engine(bundle)
    x = np.ones((3, 8), np.float32)
    engine.submit_call("doubled", x=x).result(60)
    engine.call("doubled", x=x)
    (found,) = engine.metrics().requests
    assert (found.succeeded, found.waited_for_compile) == (2, 1)
    engine.close()


@dataclasses.dataclass
class Collector:
    """A collector of OpenTelemetry, with what it got."""

    url: str = ""
    spans: list = dataclasses.field(default_factory=list)
    services: set = dataclasses.field(default_factory=set)
    metrics: set = dataclasses.field(default_factory=set)


@pytest.fixture
def collector():
    state = Collector()

    class Handler(QuietHandler):
        def do_POST(self):
            content = self.content()
            if self.path == "/v1/traces":
                for one in ExportTraceServiceRequest.FromString(content).resource_spans:
                    named = {each.key: each.value.string_value for each in one.resource.attributes}
                    state.services.add(named["service.name"])
                    state.spans += [span for scope in one.scope_spans for span in scope.spans]
            else:
                for one in ExportMetricsServiceRequest.FromString(content).resource_metrics:
                    state.metrics |= {m.name for scope in one.scope_metrics for m in scope.metrics}
            self.reply(200)

    with serving(Handler) as place:
        state.url = f"http://{place}"
        yield state


def test_a_server_is_scraped_and_sends_traces(decoder_dir, collector, serve):
    options = ("--slots", "3", "--prefix-memory", "2M")
    process = serve(decoder_dir, *options, OTEL_EXPORTER_OTLP_ENDPOINT=collector.url)
    server = Watched(process.wait_until_ready().url)
    body = {"model": "decoder", "prompt": [1, 2, 3], "max_tokens": 4}
    parent = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
    whole = server.client.post("/v1/completions", json=body, headers=parent)
    assert whole.status_code == 200, whole.text
    streamed = server.client.post("/v1/completions", json={**body, "stream": True})
    assert streamed.text.endswith("data: [DONE]\n\n")
    page = server.client.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert server.value("vllm:time_to_first_token_seconds_count") == 2
    assert server.value("prejit_server_state", state="ready") == 1
    assert server.value("prejit_prefix_cache_budget_bytes") == 2 << 20
    server.client.close()
    assert process.end(signal.SIGTERM) == 0
    assert collector.services == {"prejit"}
    names = {span.name for span in collector.spans}
    assert {"text_completion decoder", "queue", "prefill", "decode"} <= names
    of_trace = [span for span in collector.spans if span.trace_id.hex() == TRACE]
    (root,) = [span for span in of_trace if span.name == "text_completion decoder"]
    assert root.parent_span_id.hex() == "b7ad6b7169203331"
    assert "gen_ai.server.time_to_first_token" in collector.metrics
