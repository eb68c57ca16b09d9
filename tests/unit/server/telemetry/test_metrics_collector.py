"""/metrics: dashboards and gateways find nothing if a name, a label or a unit is another one."""

import shutil
import subprocess
from importlib.metadata import version

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from starlette.applications import Starlette
from starlette.testclient import TestClient
from tests.served import DIGEST, StandIn, served

from prejit.runtime import fallback_reporting
from prejit.server.engine.engine_metrics import REASONS
from prejit.server.engine.request_recorder import ENCODE, GENERATE
from prejit.server.http.app import operator_routes
from prejit.server.served.served import Models

PROMTOOL = shutil.which("promtool")
OPENMETRICS = "application/openmetrics-text; version=1.0.0"

VLLM = {
    # With their types: those of vllm/v1/metrics/loggers.py, and two older ones.
    f"vllm:{name}": kind
    for kind, names in {
        "gauge": "num_requests_running num_requests_waiting kv_cache_usage_perc gpu_cache_usage_perc",
        "counter": "prompt_tokens generation_tokens prefix_cache_queries prefix_cache_hits request_success",
        "histogram": "time_to_first_token_seconds inter_token_latency_seconds time_per_output_token_seconds "
        "e2e_request_latency_seconds request_queue_time_seconds request_prefill_time_seconds "
        "request_decode_time_seconds request_prompt_tokens request_generation_tokens",
    }.items()
    for name in names.split()
}


def client(of):
    return TestClient(Starlette(routes=list(operator_routes(of))))


def families(of):
    response = client(of).get("/metrics")
    assert response.status_code == 200
    return {family.name: family for family in parse_text(response.text)}


def value(of, sample, **labels):
    [found] = [
        each.value
        for family in families(of).values()
        for each in family.samples
        if each.name == sample and labels.items() <= each.labels.items()
    ]
    return found


def ours(of, requests, name, **labels):
    """Return the value of one of our series of such requests."""
    named = dict(zip(("kind", "program"), requests, strict=True))
    return value(of, f"prejit_{name}", **named, **labels)


def test_every_end_of_a_generation_is_counted_once_and_failures_do_not_make_latencies_look_better():
    engine = StandIn()
    generations = engine.recorder.generations
    for reason, seconds in (("stop", 0.12), ("length", 0.12), ("context", 3.0), ("nan", 0.12)):
        engine.request(reason, first_token_seconds=seconds)
    generations.refused()
    generations.submitted()
    generations.abandoned("deadline")
    for reason in ("cancelled", "error"):
        generations.submitted()
        generations.admitted(0.0)
        engine.recorder.finished(reason, 0.001)
    generations.submitted()
    of = Models(served(engine=engine))
    for name, total in (
        *(("num_requests_waiting", 1), ("num_requests_running", 0), ("prompt_tokens_total", 20)),
        *(("prefix_cache_queries_total", 20), ("prefix_cache_hits_total", 8)),
        ("generation_tokens_total", 12),
    ):
        assert value(of, f"vllm:{name}") == total, name
    for reason, count in (("stop", 1), ("length", 2), ("abort", 2), ("error", 2)):
        assert value(of, "vllm:request_success_total", finished_reason=reason) == count, reason
    ends = {reason: ours(of, GENERATE, "requests_total", reason=reason) for reason in REASONS}
    once = ("stop", "length", "context", "nan", "refused", "deadline", "cancelled", "error")
    assert ends == dict.fromkeys(REASONS, 0) | dict.fromkeys(once, 1)
    assert ours(of, GENERATE, "device_busy_seconds_total") == pytest.approx(0.24)
    for name, total in (
        *(("runs_total", 8), ("rows_total", 4), ("padded_rows_total", 28)),
        *(("useful_positions_total", 20), ("computed_positions_total", 28)),
        *(("request_seconds_count", 4), ("request_run_seconds_count", 4)),
    ):
        assert ours(of, GENERATE, name) == total, name
    for bound, count in (("0.1", 0), ("0.25", 3), ("2.5", 3), ("5.0", 4), ("+Inf", 4)):
        assert value(of, "vllm:time_to_first_token_seconds_bucket", le=bound) == count, bound
    for name, count, total in (
        ("time_to_first_token_seconds", 4, 3.36),
        ("e2e_request_latency_seconds", 4, 4 * 0.16),
        ("request_prefill_time_seconds", 4, 4 * 0.02),
        ("request_decode_time_seconds", 4, 4 * 0.04),
        ("request_prompt_tokens", 4, 4 * 5),
        ("request_generation_tokens", 4, 4 * 3),
        ("inter_token_latency_seconds", 8, 4 * 0.04),
    ):
        assert value(of, f"vllm:{name}_count") == count, name
        assert value(of, f"vllm:{name}_sum") == pytest.approx(total), name


def test_encodings_are_requests_like_others():
    engine = StandIn()
    for reason in ("done", "done", "nan"):
        engine.encoding(reason)
    engine.encodings.submitted()
    engine.encodings.admitted(0.5)
    of = Models(served(engine=engine))
    for reason, count in (("done", 2), ("nan", 1)):
        assert ours(of, ENCODE, "requests_total", reason=reason) == count
    for name, total in (
        *(("requests_running", 1), ("requests_waiting", 0), ("request_queue_seconds_count", 4)),
        *(("useful_positions_total", 30), ("computed_positions_total", 192)),
        *(("request_run_seconds_sum", 0.03), ("request_seconds_sum", 0.06)),
    ):
        assert ours(of, ENCODE, name) == pytest.approx(total), name
    # vLLM's series have them, too: gateways balance by them.
    for name, total in (
        *(("num_requests_running", 1), ("prompt_tokens_total", 30)),
        ("prefix_cache_queries_total", 0),
    ):
        assert value(of, f"vllm:{name}") == total, name
    assert value(of, "vllm:request_success_total", finished_reason="stop") == 2


@pytest.mark.skipif(PROMTOOL is None, reason="needs promtool (Debian: apt-get install prometheus)")
def test_promtool_complains_of_no_name_but_those_of_vllm():
    page = client(Models(served())).get("/metrics").text
    done = subprocess.run(
        [PROMTOOL, "check", "metrics"], input=page, capture_output=True, text=True
    )
    found = (done.stdout + done.stderr).splitlines()
    assert len(found) >= len(VLLM)
    assert [line for line in found if not line.startswith("vllm:")] == []


def test_what_runs_and_what_it_has_can_be_read_while_it_loads_too():
    found = families(of := Models(served("a")))
    info = found["prejit_build_info"].samples[0]
    assert (info.name, info.value) == ("prejit_build_info", 1)
    expected = {"model_name": "a", "bundle": "gpt2", "digest": DIGEST, "target": "h100"}
    expected |= {"cuda": "13.1"} | {name: version(name) for name in ("prejit", "jax", "jaxlib")}
    assert info.labels == expected
    # Alerts see the first one: each source has a value from the beginning.
    programs = {each.labels["source"]: each.value for each in found["prejit_programs"].samples}
    assert programs == {"loaded": 1, "compiled": 0, "kept": 0, "compiling": 0, "unused": 0}
    assert 0 < value(of, "prejit_host_memory_bytes") < value(of, "prejit_host_memory_limit_bytes")
    assert value(of, "process_resident_memory_bytes") > 0
    of = Models()
    states = ("loading", "ready")
    assert [value(of, "prejit_server_state", state=each) for each in states] == [1, 0]
    of.add(served())
    of.change("loading", "ready")
    assert [value(of, "prejit_server_state", state=each) for each in states] == [0, 1]


def test_the_parts_of_a_start_come_after_the_first_answer_and_without_idle_time():
    engine = StandIn()
    calls = []
    one = served(engine=engine)
    report = one.bundle.start_report()
    vars(one.bundle)["start_report"] = lambda: calls.append(1) or report
    found = client(Models(one))
    assert "prejit_start_seconds{" not in found.get("/metrics").text
    engine.request()
    for _ in range(2):
        text = found.get("/metrics").text
        assert 'prejit_start_seconds{model_name="demo",part="loading"} 0.5' in text
        assert 'part="other"' not in text
    assert calls == [1]  # it looks at the disk


def test_fallbacks_swaps_and_lost_lines_are_counted_and_a_wrong_answer_is_seen(monkeypatch):
    monkeypatch.setattr(fallback_reporting, "_counts", {"jaxlib": 2})
    of = Models(served("a"), served("b", matched=False))
    assert value(of, "prejit_fallbacks_total", axis="jaxlib") == 2
    assert [value(of, "prejit_target_matched", model_name=each) for each in "ab"] == [1, 0]
    swaps = {"model_name": "a", "outcome": "failed"}
    assert value(of, "prejit_swaps_total", **swaps) == value(of, "prejit_log_lines_lost_total") == 0
    of.swaps["a", "failed"] += 1
    of.wrong["b"] = "f"
    assert value(of, "prejit_swaps_total", **swaps) == 1
    assert [value(of, "prejit_wrong_answers", model_name=each) for each in "ab"] == [0, 1]


def test_names_of_vllm_have_types_and_labels_and_two_bundles_do_not_share_a_series():
    strange, first = 'a"b\\c\nd', StandIn()
    first.request()
    of = Models(served("a", first), served(strange, StandIn(slots=4)))
    text = client(of).get("/metrics", headers={"accept": OPENMETRICS}).text
    assert text.endswith("# EOF\n")
    new = {family.name: family for family in parse_openmetrics(text)}  # raises if it is malformed
    assert {sample.name for family in new.values() for sample in family.samples} == {
        sample.name for family in families(of).values() for sample in family.samples
    }
    assert {name: new[name].type for name in VLLM} == VLLM
    labels = {sample.labels["engine"] for name in VLLM for sample in new[name].samples}
    assert labels == {"0"}
    tokens = [value(of, "vllm:generation_tokens_total", model_name=each) for each in ("a", strange)]
    assert tokens == [3, 0]
    assert value(of, "prejit_slots", model_name=strange) == 4
