"""A real Prometheus scrapes /metrics, evaluates every alert rule, and answers every query of a dashboard."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from typing import Any

import pytest
import uvicorn
from tests.monitoring import DASHBOARDS, RULES, RULES_FILE, panels, queries
from tests.ports import free_port
from tests.served import StandIn, served

from prejit.runtime.programs.ready_programs import ProgramReport
from prejit.server.gate.server_settings import Settings
from prejit.server.http.app import make_app
from prejit.server.observe.monitoring_files import files
from prejit.server.served.served import Models
from prejit.server.telemetry.metrics_collector import EngineCollector

PROMETHEUS = shutil.which("prometheus")
pytestmark = pytest.mark.skipif(
    PROMETHEUS is None, reason="needs prometheus (Debian: apt-get install prometheus)"
)

_NAME = re.compile(r"\b(?:vllm:|prejit_|process_|model:)[a-z0-9_:]+")
ABSENT = {
    # A server has these only on an accelerator, or after a fallback.
    "prejit_device_memory_bytes",
    "prejit_fallbacks_total",
}


class Scraped:
    """Two served models, and the Prometheus that scrapes them."""

    def __init__(self, directory: Any) -> None:
        self.engines = StandIn(), StandIn()
        of = Models(served("demo", self.engines[0]), served("other", self.engines[1]))
        self.port, target = free_port(), free_port()
        self.wrong_request = f"http://127.0.0.1:{target}/nothing"
        self.server = uvicorn.Server(
            uvicorn.Config(
                make_app(of, Settings()), port=target, lifespan="off", ws="none", log_level="error"
            )
        )
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        (directory / "prejit.rules.yml").write_text(files("https://wiki.example")[RULES_FILE])
        job = {"job_name": "prejit", "static_configs": [{"targets": [f"127.0.0.1:{target}"]}]}
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": ["prejit.rules.yml"],
            "scrape_configs": [job],
        }
        (directory / "prometheus.yml").write_text(json.dumps(config))
        self.log = (directory / "log").open("w")
        assert PROMETHEUS is not None
        self.process = subprocess.Popen(
            [
                PROMETHEUS,
                f"--config.file={directory / 'prometheus.yml'}",
                f"--storage.tsdb.path={directory / 'data'}",
                f"--web.listen-address=127.0.0.1:{self.port}",
            ],
            stdout=self.log,
            stderr=subprocess.STDOUT,
        )

    def api(self, path: str, **query: str) -> Any:
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                found = json.load(answer)
        except urllib.error.HTTPError as error:
            found = json.load(error)
            error.close()
        assert found["status"] == "success", (query, found)
        return found["data"]

    def query(self, query: str) -> list[Any]:
        found: list[Any] = self.api("query", query=query)["result"]
        return found

    def wait(self, until: Any, what: str) -> None:
        deadline = time.monotonic() + 60
        while True:
            try:
                if until():
                    return
            except (OSError, json.JSONDecodeError):
                pass  # it does not listen, or is not ready, yet
            assert self.process.poll() is None, "prometheus ended"
            assert time.monotonic() < deadline, what
            time.sleep(0.3)

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(30)
        self.log.close()
        self.server.should_exit = True
        self.thread.join()


@pytest.fixture(scope="module")
def scraped(tmp_path_factory):
    found = Scraped(tmp_path_factory.mktemp("prometheus"))
    try:
        found.wait(
            lambda: found.query("min(count_over_time(prejit_slots[1m])) >= 2"), "two scrapes"
        )
        for engine in found.engines:
            for _ in range(5):
                engine.request()
                engine.encoding()
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(found.wrong_request, timeout=10)
        found.wait(
            lambda: found.query("min(count_over_time(prejit_http_requests_total[1m])) >= 2"),
            "two scrapes of it",
        )
        found.wait(lambda: found.query("min(vllm:prompt_tokens_total) == 75"), "the requests")
        for name in filter(None, (rule.get("record") for rule in RULES)):
            # Recorded from the first evaluation after that on.
            found.wait(lambda name=name: found.query(f"{name} >= 0"), name)
        yield found
    finally:
        found.close()


def plain(query: str) -> str:
    """Return a query as Grafana sends it, with everything chosen."""
    query = query.replace("$__rate_interval", "1m")
    return re.sub(r"\$(job|instance|model)\b", ".*", query)


def test_the_target_is_up_and_its_page_was_understood(scraped):
    (target,) = scraped.api("targets", state="active")["activeTargets"]
    assert target["health"] == "up", target["lastError"]
    assert scraped.query("scrape_samples_scraped")[0]["value"][1] != "0"


@pytest.mark.parametrize("dashboard", DASHBOARDS)
def test_every_query_of_a_dashboard_gives_data(scraped, dashboard):
    empty = []
    for panel in panels(dashboard):
        for query in queries(panel):
            found = scraped.query(plain(query))  # raises if Prometheus refuses it
            if not found and not set(_NAME.findall(query)) & ABSENT and "ALERTS" not in query:
                empty.append(f"{panel['title']}: {query}")
    assert empty == []


def test_metrics_that_no_test_can_scrape_are_written_by_the_collector(scraped):
    engine = StandIn()
    engine.state["device_memory_bytes"] = 5
    families = list(EngineCollector(Models(served(engine=engine))).collect())
    names = {family.name for family in families}
    assert {"prejit_device_memory_bytes", "prejit_fallbacks"} <= names


def test_no_rule_fails(scraped):
    def all_rules() -> list[Any]:
        return [rule for group in scraped.api("rules")["groups"] for rule in group["rules"]]

    scraped.wait(lambda: all(each["health"] != "unknown" for each in all_rules()), "the rules")
    rules = all_rules()
    assert len(rules) == len(RULES)
    assert {
        rule["name"]: rule.get("lastError", "") for rule in rules if rule["health"] != "ok"
    } == {}


def test_alerts_reach_people_with_words_that_they_understand(scraped):
    assert scraped.query('ALERTS{alertname="PrejitNaN"}') == []
    scraped.engines[1].request("nan", obtained=(ProgramReport("decode", "compiled", 3.0),))
    wanted = {"PrejitNaN", "PrejitRequestsCompile"}

    def firing() -> dict[str, Any]:
        return {alert["labels"]["alertname"]: alert for alert in scraped.api("alerts")["alerts"]}

    scraped.wait(lambda: wanted <= firing().keys(), "the alerts")
    nan = firing()["PrejitNaN"]
    assert nan["labels"]["model_name"] == "other"
    assert nan["labels"]["severity"] == "page"
    assert nan["annotations"]["runbook_url"] == "https://wiki.example/PrejitNaN.md"
    assert nan["annotations"]["summary"].endswith("other: requests end in NaN")
    for alert in firing().values():
        assert "<" not in alert["annotations"]["summary"]  # <error expanding template: ...>
