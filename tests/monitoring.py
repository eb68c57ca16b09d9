"""The rules and the dashboards that `prejit observe init` writes, parsed."""

import json
from pathlib import Path

import yaml

from prejit.server.telemetry.monitoring_files import files

FILES = files("runbooks")
RULES_FILE = "prometheus/prejit.rules.yml"
RULES = [rule for group in yaml.safe_load(FILES[RULES_FILE])["groups"] for rule in group["rules"]]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
DASHBOARDS = {
    Path(path).stem: json.loads(text) for path, text in FILES.items() if path.endswith(".json")
}


def panels(dashboard):
    return [panel for panel in DASHBOARDS[dashboard]["panels"] if panel["type"] != "row"]


def queries(panel):
    return [target["expr"] for target in panel["targets"]]
