"""A real Prometheus with the rules of `prejit observe init`, 15 times faster, and what its alerts say."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from tests.ports import free_port
from tests.processes import ran
from tests.waiting import wait_for

from prejit.server.telemetry.monitoring_files import write

FASTER = 15
"""All durations of the rules and of the settings are divided by this number: scrapes come each second instead
of every 15, `for: 2m` is 8 seconds, and a window of an hour is one of 4 minutes. Nothing else is changed."""
OF_SPEED = "Prejit(FirstToken|Call)Budget.*|PrejitSaturated"
"""Alerts that say how busy the machine is, on which no test may depend."""
_DURATION = re.compile(r"(for: |_interval: |\[)(\d+)([smhd])\b")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def faster(text):
    """Return rules or settings of Prometheus whose durations are divided by FASTER."""

    def shorter(found):
        return f"{found[1]}{int(found[2]) * _SECONDS[found[3]] * 1000 // FASTER}ms"

    return _DURATION.sub(shorter, text)


class Prometheus:
    def __init__(self, directory, ports):
        """Start it in a directory. Skip the test where Prometheus is not installed."""
        program = shutil.which("prometheus")
        if program is None:
            pytest.skip("prometheus is not installed (Debian: apt-get install prometheus)")
        self.runbooks = directory / "runbooks"
        write(directory, runbooks=str(self.runbooks), force=True)
        for file in (directory / "prometheus").iterdir():
            file.write_text(faster(file.read_text()))
        settings = directory / "prometheus" / "prometheus.yml"
        servers = ", ".join(f'"127.0.0.1:{port}"' for port in ports)
        text = settings.read_text()
        assert '["127.0.0.1:8000"]' in text
        settings.write_text(text.replace('["127.0.0.1:8000"]', f"[{servers}]"))
        port = free_port()
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1", timeout=60)
        options = ("--web.listen-address", f"127.0.0.1:{port}", "--log.level=warn")
        self._log = (directory / "prometheus.log").open("w+")
        command = [program, f"--config.file={settings}", f"--storage.tsdb.path={directory}/tsdb"]
        self._process = subprocess.Popen([*command, *options], stdout=self._log, stderr=self._log)
        wait_for(self._answers, what=f"{self._log.name}: Prometheus does not answer")

    def _answers(self):
        assert self._process.poll() is None, Path(self._log.name).read_text()
        try:
            return bool(self._get("query", query="1"))
        except httpx.HTTPError:
            return False

    def _get(self, path, **parameters):
        answer = self._client.get(path, params=parameters)
        answer.raise_for_status()
        return answer.json()["data"]

    def value(self, query):
        """Return the sum of the series of a query now; 0 without any."""
        return sum(float(each["value"][1]) for each in self._get("query", query=query)["result"])

    def firing(self):
        return {a["labels"]["alertname"] for a in self._alerts() if a["state"] == "firing"}

    def _alerts(self):
        return self._get("alerts")["alerts"]

    def fired(self, severity=".*"):
        """Return the names of the alerts that have fired since the start, without those OF_SPEED."""
        of = f'alertname!~"{OF_SPEED}",severity=~"{severity}"'
        matched = f'ALERTS{{alertstate="firing",{of}}}'
        found = self._get("query", query=f"max by (alertname) (max_over_time({matched}[1h]))")
        return {each["metric"]["alertname"] for each in found["result"]}

    def wait_for_alert(self, name, seconds=120):
        """Wait until an alert fires; return the seconds. Check that its annotation leads to a runbook."""
        began = time.monotonic()
        wait_for(lambda: name in self.firing(), seconds, f"{name} did not fire")
        took = time.monotonic() - began
        [url] = {
            alert["annotations"]["runbook_url"]
            for alert in self._alerts()
            if alert["labels"]["alertname"] == name
        }
        assert Path(url) == self.runbooks / f"{name}.md"
        return took

    def wait_for_end(self, name, seconds=120):
        wait_for(lambda: name not in self.firing(), seconds, f"{name} still fires")

    def follow(self, alert, command, *, env=None, **words):
        """Run a command that an alert's runbook gives."""
        page = (self.runbooks / f"{alert}.md").read_text()
        assert command in page, f"{alert}.md has no command {command}"
        for word, value in words.items():
            assert word in command
            command = command.replace(word, str(value))
        bins = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {**os.environ, "PATH": bins, **(env or {})}
        return ran(*shlex.split(command), status=None, env=environment)

    def close(self):
        self._process.kill()
        self._process.wait()
        self._client.close()
        self._log.close()
