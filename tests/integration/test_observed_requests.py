"""Servers of encoders and of functions: whoever watches one sees every request, and why it failed."""

import re

import httpx
import jax.numpy as jnp
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.monitoring import all_queries
from tests.unit.runtime.test_fallback import v2_machine
from tests.unit.server.running import running, wait_for

from prejit.compiler import Program, build
from prejit.runtime import FallbackWarning, load
from prejit.server.engine.engine import Engine
from prejit.server.gate.server_settings import Settings
from prejit.server.served.served import Models, Served

ABSENT = {
    # Such a server has no cache and no slots; the others are those of accelerators and of fallbacks.
    *("prejit_slots", "prejit_kv_cache_bytes", "prejit_kv_cache_budget_bytes"),
    *("prejit_prefix_cache_bytes", "prejit_prefix_cache_budget_bytes"),
    *("prejit_device_memory_bytes", "prejit_fallbacks_total"),
}


@pytest.fixture(scope="module")
def functions_dir(tmp_path_factory, build_cache):
    doubled = Program(
        "doubled",
        fn=lambda x: jnp.tanh(x) * 2,
        args={"x": "float32[{batch}, 8]"},
        buckets={"batch": [4]},
        pad=["batch"],
    )
    output = tmp_path_factory.mktemp("functions")
    return build([doubled], output, name="functions", cache=build_cache, quiet=True).path


class Watched:
    """A server of one bundle, and what it says of itself."""

    def __init__(self, server):
        self._server = server
        self.client = httpx.Client(base_url=server.url, timeout=60)

    def statuses(self, path, *bodies):
        return [self.client.post(path, json=body).status_code for body in bodies]

    def samples(self):
        """The samples of each name; names of families without any have an empty list."""
        found = {}
        endings = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum")}
        for family in text_string_to_metric_families(self.client.get("/metrics").text):
            for ending in endings.get(family.type, ("",)):
                found.setdefault(family.name + ending, [])
            for sample in family.samples:
                found.setdefault(sample.name, []).append(sample)
        return found

    def value(self, name, **labels):
        """The sum of the samples with these labels."""
        each = self.samples()[name]
        return sum(one.value for one in each if labels.items() <= one.labels.items())

    def answers(self):
        return {
            (one.labels["route"], one.labels["status"]): one.value
            for one in self.samples()["prejit_http_requests_total"]
        }

    def figures(self):
        (found,) = self.client.get("/page/figures").json()["models"].values()
        return found


def watched(name, path):
    bundle = load(path, on_mismatch="error")
    models = Models(Served(name, bundle, Engine(bundle), 1))
    with running(models, Settings()) as server:
        found = Watched(server)
        yield found
        found.client.close()
    models.close()


@pytest.fixture
def encoder(encoder_dir):
    yield from watched("sentences", encoder_dir)


@pytest.fixture
def functions(functions_dir):
    yield from watched("functions", functions_dir)


def infer(rows, **changed):
    tensor = {"name": "x", "datatype": "FP32", "shape": [rows, 8], "data": [0.5] * rows * 8}
    return {"inputs": [tensor | changed]}


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
    wait_for(
        lambda: (
            encoder.answers()
            == {
                ("/v1/embeddings", "200"): 2,
                ("/v1/embeddings", "400"): 2,
                ("/v1/embeddings", "404"): 1,
                ("/v1/embeddings", "405"): 1,
                ("/v1/score", "200"): 1,
                ("/v1/rerank", "200"): 1,
                ("other", "404"): 1,
            }
        )
    )
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
    check_queries(encoder)


def test_requests_to_a_function_are_observed(functions):
    path = "/v2/models/doubled/infer"
    wrong = [infer(3, name="z"), infer(3, datatype="FP64"), {}]
    assert functions.statuses(path, infer(3), infer(6), *wrong) == [200, 200, 400, 400, 400]
    assert functions.statuses("/v2/models/other/infer", infer(3)) == [404]
    route = "/v2/models/{model}/infer"
    wait_for(
        lambda: functions.answers() == {(route, "200"): 2, (route, "400"): 3, (route, "404"): 1}
    )
    program = {"kind": "call", "program": "doubled"}
    assert functions.value("prejit_requests_total", **program, reason="done") == 2
    assert functions.value("prejit_requests_total") == 2
    assert functions.value("prejit_rows_total", **program) == 3 + 6
    assert functions.value("prejit_runs_total", **program) == 1 + 2
    assert functions.value("prejit_padded_rows_total", **program) == 3 * 4 - 9
    (calls,) = functions.figures()["calls"]
    assert (calls["program"], calls["finished"], calls["rows_per_run"]) == ("doubled", 2, 3)
    assert calls["padding"] == pytest.approx(3 / 12)
    check_queries(functions)


def check_queries(server):
    """Check that what alerts and dashboards query is there."""
    used = {
        name
        for query in all_queries()
        for name in re.findall(
            r"\b(?:vllm:|prejit_|process_)[a-z0-9_]+", re.sub(r'"[^"]*"', "", query)
        )
        if not re.search(rf"model:{name}\b", query)
    }
    samples = server.samples()
    assert len(used) > 40
    assert used <= samples.keys()
    assert {name for name in used if not samples[name]} <= ABSENT


def test_an_embedding_that_is_no_number_is_seen(encoder, monkeypatch):
    from prejit.runtime.encoding.encoder import EncoderPrograms

    run = EncoderPrograms._run
    monkeypatch.setattr(EncoderPrograms, "_run", lambda *given: run(*given) * np.nan)
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
