"""`prejit observe init`: nobody loses an edited file, and no link or name leads nowhere."""

import functools
import json
import re
from pathlib import Path

import pytest
import yaml
from tests.monitoring import ALERTS, DASHBOARDS, FILES, RULES, RULES_FILE, panels, queries

from prejit.runtime.cli.commands import commands
from prejit.runtime.errors import StoreError, UsageError
from prejit.server.cli.serve_command import serve
from prejit.server.telemetry.monitoring_files import files, write


def test_the_command_writes_every_file_and_refuses_runbooks_that_no_browser_finds(tmp_path, ran):
    for given, hint in (
        ("wiki.example/runbooks", "write https://wiki.example/runbooks"),
        ("https:///runbooks", "write https://HOST/PATH"),
        ("", "leave it out"),
    ):
        said = ran("observe", "init", tmp_path / "watch", "--runbooks", given, status=2).err
        assert "--runbooks: expected a URL" in said
        assert hint in said
        assert not (tmp_path / "watch").exists()
    printed = ran("observe", "init", tmp_path / "watch").out.splitlines()
    there = sorted(str(path) for path in (tmp_path / "watch").rglob("*") if path.is_file())
    assert sorted(printed) == there
    assert len(there) == len(FILES) == 5 + len(DASHBOARDS) + len(ALERTS)


def test_an_edited_file_is_kept_and_named(tmp_path):
    write_to = functools.partial(write, runbooks="runbooks")
    assert write_to(tmp_path, force=False) == write_to(tmp_path, force=False)  # no conflict
    edited = tmp_path / "prometheus" / "prejit.rules.yml"
    edited.write_text("mine")
    (tmp_path / "README.md").unlink()
    with pytest.raises(UsageError, match=r"prometheus/prejit\.rules\.yml") as caught:
        write_to(tmp_path, force=False)
    assert "--force" in caught.value.hint
    assert edited.read_text() == "mine"
    assert not (tmp_path / "README.md").exists()  # nothing at all is written
    write_to(tmp_path, force=True)
    assert edited.read_text() != "mine"
    (tmp_path / "watch").write_text("")
    with pytest.raises(StoreError, match="watch"):
        write_to(tmp_path / "watch", force=False)


def test_every_alert_links_to_its_runbook_and_pages_name_what_exists():
    for home in ("runbooks", "https://wiki.example/runbooks", 'a: "b\\c'):
        groups = yaml.safe_load(files(f"{home}/")[RULES_FILE])["groups"]
        rules = [rule for group in groups for rule in group["rules"] if "alert" in rule]
        links = {rule["alert"]: rule["annotations"]["runbook_url"] for rule in rules}
        assert links == {name: f"{home}/{name}.md" for name in ALERTS}
    assert {Path(path).stem for path in FILES if path.startswith("runbooks/")} == ALERTS.keys()
    for name in ALERTS:
        page = FILES[f"runbooks/{name}.md"]
        assert page.startswith(f"# {name}\n\n**Means.** ")
        for part in ("**Who notices.** ", "**Look at**", "**Do**"):
            assert part in page, (name, part)
    titles = {panel["title"] for name in DASHBOARDS for panel in panels(name)}
    names = {dashboard["title"] for dashboard in DASHBOARDS.values()}
    options = {name for parameter in serve.params for name in parameter.opts}
    for path, text in FILES.items():
        if path.endswith(".md"):
            for link in re.findall(r"\]\(([^)]+)\)", text):
                assert f"runbooks/{link}" in FILES, (path, link)
        if path.startswith("runbooks/"):
            for name in re.findall(r"(?<!\*)\*([^*\n]+)\*(?!\*)", text):
                assert name in titles | names, (path, name)
        for command in re.findall(r"`prejit ([a-z-]+)", text):
            assert command in commands.commands, (path, command)
        for option in re.findall(r"`prejit serve (--[a-z-]+)", text):
            assert option in options, (path, option)


def test_panels_show_the_chosen_job_and_controllers_ask_for_series_that_the_rules_record():
    for name, dashboard in DASHBOARDS.items():
        for panel in panels(name):
            assert panel["description"].endswith(".")
            assert all("$job" in query for query in queries(panel)), (name, panel["title"])
        used = set(re.findall(r"\$\{?([a-z]\w*)\}?", json.dumps(dashboard)))
        assert used <= {one["name"] for one in dashboard["templating"]["list"]}
    records = {rule["record"] for rule in RULES if rule.get("record", "").startswith("release:")}
    asked = []
    for path in ("rollouts/argo-analysis.yaml", "rollouts/flagger-metrics.yaml"):
        for document in yaml.safe_load_all(FILES[path]):
            metrics = document["spec"].get("metrics")
            found = [document["spec"]["query"]] if metrics is None else []
            found += [each["provider"]["prometheus"]["query"] for each in metrics or ()]
            assert all('digest="{{' in query for query in found)
            asked.append({query.partition("{")[0] for query in found})
    assert asked[0] == set.union(*asked[1:]) == records
