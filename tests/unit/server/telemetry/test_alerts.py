"""Alerts fire when they should and queries of dashboards give data, by Prometheus' `promtool test rules`."""

import collections
import json
import re
import shutil
from dataclasses import dataclass

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient
from tests.extent import cases
from tests.monitoring import ALERTS, DASHBOARDS, RULES, RULES_FILE, panels, queries
from tests.processes import ran
from tests.served import StandIn, served

from prejit.server.engine.engine_metrics import FIRST_TOKEN_BOUNDS, REQUEST_BOUNDS
from prejit.server.gate.server_settings import Settings
from prejit.server.http.app import make_app
from prejit.server.served.served import Models
from prejit.server.telemetry.monitoring_files import files

PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="needs promtool (Debian: apt-get install prometheus)"
)

MODEL = 'job="prejit",instance="a",model_name="demo"'
SERVER = 'job="prejit",instance="a"'
TARGET = {"job": "prejit", "instance": "a"}
GENERATE = 'kind="generate",program="generate"'
ENCODE = 'kind="encode",program="encode"'
GENERATES, ENCODES = f"{{{MODEL},{GENERATE}}}", f"{{{MODEL},{ENCODE}}}"
AT_SERVER = f"{{{SERVER}}}"


@dataclass(frozen=True)
class Case:
    """Series, by their names, with values in promtool's notation; and whether an alert fires at a time."""

    alert: str
    fires: bool
    at: str
    series: dict[str, str]
    interval: str = "1m"


def requests(points, **each):
    """Return counters of requests by reason, each of which grows by so many in an interval."""
    return {
        f'prejit_requests_total{{{MODEL},{GENERATE},reason="{reason}"}}': f"0+{step}x{points}"
        for reason, step in each.items()
    }


def latencies(name, labels, quick, total, length):
    return {
        f'{name}_bucket{{{labels},le="2.5"}}': f"0+{quick}x{length}",
        f"{name}_count{{{labels}}}": f"0+{total}x{length}",
    }


def first_tokens(quick, total, length):
    return latencies("vllm:time_to_first_token_seconds", MODEL, quick, total, length)


def calls(quick, total, length):
    """Return the times of calls, beside generations that all take longer."""
    name = "prejit_request_seconds"
    return {
        **latencies(name, f"{MODEL},{ENCODE}", quick, total, length),
        **latencies(name, f"{MODEL},{GENERATE}", 0, 100, length),
    }


def when(alert, at, series, fires, quiet, interval="1m"):
    """Return a case for each row of `fires` and `quiet`, which fills the gaps of names and values.

    A name without labels has those of the model.
    """
    cases = []
    for row in (*fires, *quiet):
        given = row if isinstance(row, tuple) else (row,)
        filled = {
            (name if "{" in name else f"{name}{{{MODEL}}}").replace("STATE", str(given[0])): (
                values.format(*given)
            )
            for name, values in series.items()
        }
        cases.append(Case(alert, row in fires, at, filled, interval))
    return cases


FAST, SLOWLY = "PrejitErrorBudgetBurnsFast", "PrejitErrorBudgetBurnsSlowly"
LATENCIES = [
    Case(f"Prejit{of}BudgetBurns{how}", fires, at, made(quick, total, length), interval)
    for of, made in (("FirstToken", first_tokens), ("Call", calls))
    for how, at, length, interval, rows in (
        ("Fast", "60m", 60, "1m", ((80, 100, True), (95, 100, False), (0, 0, False))),
        ("Slowly", "300m", 80, "5m", ((96, 100, True), (995, 1000, False))),
    )
    for quick, total, fires in rows
]
STATES = {f'prejit_server_state{{{SERVER},state="STATE"}}': "{1}"}
NAN = {f'prejit_requests_total{{{MODEL},{ENCODE},reason="nan"}}': "{}"}
STOPPED_CALLS = {
    f"prejit_requests_running{ENCODES}": "{}x20",
    f'prejit_requests_total{{{MODEL},{ENCODE},reason="done"}}': "{1}",
    # Another function goes on.
    f'prejit_requests_total{{{MODEL},kind="call",program="f",reason="done"}}': "0+9x20",
}
STOPPED_TOKENS = {
    f"prejit_requests_running{GENERATES}": "{}x20",
    "vllm:generation_tokens_total": "{1}",
}
QUEUES = {
    f"prejit_requests_waiting{ENCODES}": "{}x10",
    f"prejit_queue_size{ENCODES}": "256x10",
    f"prejit_queue_size{GENERATES}": "256x10",
}
SATURATED = {
    f"prejit_device_busy_seconds_total{ENCODES}": "0+{}x60",
    f"prejit_requests_waiting{ENCODES}": "{1}x60",
}
COMPILING = {
    "prejit_requests_waited_for_compile_total": "{}",
    f'prejit_requests_total{{{MODEL},reason="stop"}}': "0+10x20",
}
FALLBACKS = {f'prejit_fallbacks_total{{{SERVER},axis="jaxlib"}}': "{}"}
SWAPS = {f'prejit_swaps_total{{{MODEL},outcome="STATE"}}': "{1}"}
PREFIXES = {"vllm:prefix_cache_hits_total": "{}", "vllm:prefix_cache_queries_total": "0+4000x80"}
CACHES = {
    "prejit_kv_cache_bytes": "{}x30",
    "prejit_kv_cache_budget_bytes": "100x30",
    f"prejit_requests_waiting{GENERATES}": "{1}x30",
}
GROWING = {
    f"prejit_host_memory_bytes{AT_SERVER}": "{}",
    f"process_start_time_seconds{AT_SERVER}": "{1}x60",
}
HIGH = {
    f"prejit_host_memory_bytes{AT_SERVER}": "{}x20",
    f"prejit_host_memory_limit_bytes{AT_SERVER}": "100x20",
}
CASES = (
    *when("PrejitDown", "5m", {f"up{AT_SERVER}": "{}"}, ["0x10"], ["1 0 1x10"]),
    Case("PrejitDown", False, "5m", {'up{job="node",instance="a"}': "0x10"}),
    *when("PrejitNotReady", "6m", STATES, [("loading", "1x10"), ("compiling", "1x9")], []),
    *when("PrejitNotReady", "6m", STATES, [], [("draining", "1x9"), ("loading", "1x3 0x10")]),
    Case(FAST, True, "60m", requests(60, error=2, stop=98)),
    Case(FAST, True, "60m", requests(60, refused=20, length=980)),
    Case(FAST, True, "60m", requests(60, nan=5, deadline=15, stop=980)),
    Case(FAST, False, "60m", requests(60, error=1, stop=199)),
    Case(FAST, False, "60m", requests(60, cancelled=50, stop=50)),  # clients may leave
    Case(FAST, False, "60m", requests(60, error=0, stop=0)),  # no traffic
    Case(SLOWLY, True, "300m", requests(80, error=4, stop=996), "5m"),
    Case(FAST, False, "300m", requests(80, error=4, stop=996), "5m"),
    Case(SLOWLY, False, "300m", requests(80, error=1, stop=1999), "5m"),
    *LATENCIES,
    *when("PrejitCallsStopped", "15m", STOPPED_CALLS, [(1, "9x20")], [(1, "9+1x20"), (0, "9x20")]),
    *when("PrejitTokensStopped", "15m", STOPPED_TOKENS, [(1, "100x20")], [(1, "100+1x20")]),
    *when("PrejitTokensStopped", "15m", STOPPED_TOKENS, [], [(0, "100x20")]),
    *when("PrejitQueueFull", "6m", QUEUES, [250], [100]),
    *when("PrejitSaturated", "55m", SATURATED, [(59, 3)], [(59, 0), (30, 3)]),
    *when("PrejitRequestsCompile", "10m", COMPILING, ["0x5 1x15"], ["0x20", "3x20"]),
    *when("PrejitCompileTime", "10m", {"prejit_compile_seconds_total": "0x5 {}x30"}, [90], [20]),
    *when("PrejitFallback", "1m", FALLBACKS, ["1x5"], ["0x5"]),
    *when("PrejitNaN", "8m", NAN, ["0x5 1x10"], ["0x15"]),
    *when("PrejitNaN", "40m", NAN, [], ["0 1x50"]),  # long ago
    *when("PrejitWrongAnswers", "3m", {"prejit_wrong_answers": "{}"}, ["0 0 1x5"], ["1 0x5"]),
    *when("PrejitSwapFailed", "8m", SWAPS, [("failed", "0x5 1x10")], [("failed", "1x15")]),
    *when("PrejitSwapFailed", "8m", SWAPS, [], [("done", "0x5 1x10")]),
    *when("PrejitModelsTakeTurns", "40m", {"prejit_wakes_total": "0+{}x60"}, [12], [3]),
    *when(
        *("PrejitLogLinesLost", "8m", {f"prejit_log_lines_lost_total{AT_SERVER}": "{}"}),
        *(["0x5 3x10"], ["3x15"]),
    ),
    *when(
        *("PrejitPrefixCacheMisses", "1560m", PREFIXES),
        ["0+2400x72 172800x6"],
        ["0+2400x80", "0+200x72 14400x6"],  # in the last one there never were many
        "20m",
    ),
    *when("PrejitCacheMemoryFull", "20m", CACHES, [(99, 2)], [(99, 0), (50, 2)]),
    *when(
        *("PrejitHostMemoryGrows", "240m", GROWING, [("1000+10x60", 0)]),
        [("1000x60", 0), ("1000+10x60", 7200)],  # the last one is of a young process
        "5m",
    ),
    *when("PrejitHostMemoryHigh", "15m", HIGH, [95], [80]),
)


def as_series(series, interval="1m"):
    given = [{"series": name, "values": values} for name, values in series.items()]
    return {"interval": interval, "input_series": given}


def as_test(case):
    """Return a case as promtool reads it. Prometheus has a series ALERTS for each alert that fires."""
    query = f'count by (alertname) (ALERTS{{alertname="{case.alert}",alertstate="firing"}})'
    samples = [{"labels": f'{{alertname="{case.alert}"}}', "value": 1}] if case.fires else []
    return {
        **as_series(case.series, case.interval),
        "name": f"{case.alert} {'fires' if case.fires else 'is quiet'}",
        "promql_expr_test": [{"expr": query, "eval_time": case.at, "exp_samples": samples}],
    }


def run_promtool(directory, interval, tests):
    """Let promtool evaluate the rules once an interval, and check what it finds."""
    (directory / "rules.yml").write_text(files("https://wiki.example")[RULES_FILE])
    plan = {"rule_files": ["rules.yml"], "evaluation_interval": interval, "tests": tests}
    (directory / "tests.yml").write_text(json.dumps(plan))  # JSON is YAML
    ran(PROMTOOL, "test", "rules", directory / "tests.yml")


def test_every_alert_has_cases_and_thresholds_are_bounds_of_histograms():
    for fires in (True, False):
        assert {case.alert for case in CASES if case.fires == fires} == ALERTS.keys()
    bounds = {
        "vllm:time_to_first_token_seconds": FIRST_TOKEN_BOUNDS,
        "prejit_request_seconds": REQUEST_BOUNDS,
    }
    of = r'([\w:]+)_bucket\{le="([^"]+)"'
    found = [pair for rule in RULES for pair in re.findall(of, rule["expr"])]
    assert {name for name, _ in found} == bounds.keys()
    for name, seconds in found:
        assert float(seconds) in bounds[name]


def test_objectives_burn_alike_over_all_windows():
    """The cases below try one pair of windows of each alert; the files repeat what all of them share."""
    forms = collections.defaultdict(set)
    budgets = collections.defaultdict(set)
    for rule in RULES:
        if window := re.search("_rate([0-9]+[mhd])$", rule.get("record", "")):
            name = rule["record"].removesuffix(window[1])
            forms[name].add(rule["expr"].replace(f"[{window[1]}]", "[window]"))
        if burn := re.search("BudgetBurns(.*)", rule.get("alert", "")):
            found = re.findall(
                r"(model:\w+:)ratio_rate\w+ > (?:(\S+) \* )?(\S+)$", rule["expr"], re.M
            )
            assert [pair[1] for pair in found[::2]] == [pair[1] for pair in found[1::2]]
            for record, _, budget in found:
                budgets[record].add(budget)
            [record] = {record for record, _, _ in found}
            forms[burn[1]].add(rule["expr"].replace(record, "").replace(found[0][2], "budget"))
    assert len(forms) == 5
    assert {name: len(each) for name, each in forms.items()} == dict.fromkeys(forms, 1)
    assert [len(each) for each in budgets.values()] == [1, 1, 1]


@needs_promtool
@pytest.mark.parametrize("interval", cases(["5m"], others=["1m", "20m"]))
def test_alerts_fire_when_they_should_and_only_then(tmp_path, interval):
    cases = [as_test(case) for case in CASES if case.interval == interval]
    run_promtool(tmp_path, interval, cases)


@needs_promtool
def test_alerts_reach_people_with_words_that_they_understand(tmp_path):
    """A template that Prometheus cannot expand is in the text of the alert, as an error."""
    nan = {
        "exp_labels": {"severity": "page", "model_name": "demo", **TARGET},
        "exp_annotations": {
            "summary": "a demo: requests end in NaN",
            "runbook_url": "https://wiki.example/PrejitNaN.md",
        },
    }
    fires = next(case for case in CASES if case.alert == "PrejitNaN" and case.fires)
    alerts = [{"eval_time": fires.at, "alertname": "PrejitNaN", "exp_alerts": [nan]}]
    run_promtool(tmp_path, "1m", [as_test(fires) | {"alert_rule_test": alerts}])


@needs_promtool
def test_two_releases_at_a_time_are_told_apart_by_their_digests(tmp_path):
    """Servers of the old release are well; one of the new one fails, compiles and is slow."""
    series = {}
    servers = (("a", "old", 0, 0), ("b", "old", 0, 0), ("c", "new", 25, 100))
    for instance, digest, failed, slow in servers:
        labels = f'job="prejit",instance="{instance}",model_name="demo"'
        of = f"{labels},{GENERATE}"
        series[f'prejit_build_info{{{labels},digest="{digest}"}}'] = "1x20"
        for reason, step in (("error", failed), ("length", 100 - failed)):
            series[f'prejit_requests_total{{{of},reason="{reason}"}}'] = f"0+{step}x20"
        series[f"prejit_requests_waited_for_compile_total{{{of}}}"] = f"0+{failed}x20"
        for bound, step in (("1", 100 - slow), ("10", 100), ("+Inf", 100)):
            name = f'vllm:time_to_first_token_seconds_bucket{{{labels},engine="0",le="{bound}"}}'
            series[name] = f"0+{step}x20"
    expected = {
        "release:prejit_requests_failed:ratio": (0, 0.25),
        "release:prejit_requests_compiled:ratio": (0, 0.25),
        "release:prejit_first_token_seconds:p95": (0.95, 9.55),
    }
    asked = []
    for name, values in expected.items():
        for digest, value in zip(("old", "new"), values, strict=True):
            of = f'model_name="demo", digest="{digest}"}}'
            sample = {"labels": f'{{job="prejit", {of}', "value": value}
            query = {"expr": f"round({name}{{{of}, 0.01)", "eval_time": "10m"}
            asked.append({**query, "exp_samples": [sample]})
    run_promtool(tmp_path, "1m", [as_series(series) | {"promql_expr_test": asked}])


ABSENT = {
    # A server has these only on an accelerator, or after a fallback.
    "prejit_device_memory_bytes",
    "prejit_fallbacks_total",
}


def scraped_series():
    """Return every series of a server of two models after some requests, each growing by one in a minute."""
    engines = StandIn(), StandIn()
    for engine in engines:
        engine.request()
        engine.encoding()
    models = Models(served("demo", engines[0]), served("other", engines[1]))
    client = TestClient(make_app(models, Settings()))
    client.get("/nothing")
    found = {f"up{{{SERVER}}}": "1+1x10"}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for each in family.samples:
            labels = (TARGET | each.labels).items()
            shown = ",".join(f"{key}={json.dumps(text)}" for key, text in labels)
            found[f"{each.name}{{{shown}}}"] = f"{int(each.value)}+1x10"
    return found


@needs_promtool
def test_every_query_of_a_dashboard_gives_data(tmp_path):
    names = re.compile(r"\b(?:vllm:|prejit_|process_)[a-z0-9_:]+")
    chosen = re.compile(r"\$(job|instance|model)\b")
    asked = [
        {"expr": f"absent({chosen.sub('.*', query)})", "eval_time": "10m", "exp_samples": []}
        for dashboard in DASHBOARDS
        for panel in panels(dashboard)
        for query in (each.replace("$__rate_interval", "5m") for each in queries(panel))
        if not set(names.findall(query)) & ABSENT and "ALERTS" not in query
    ]
    assert len(asked) > 40
    run_promtool(tmp_path, "1m", [as_series(scraped_series()) | {"promql_expr_test": asked}])
