"""`prejit observe init`: nobody loses an edited file, and no link or name leads nowhere."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from prejit.runtime.__main__ import main
from prejit.runtime.cli.commands import commands
from prejit.runtime.cli.serve import serve
from prejit.runtime.errors import StoreError, UsageError
from prejit.runtime.observe.alerts import ALERTS
from prejit.runtime.observe.dashboards import DASHBOARDS
from prejit.runtime.observe.files import files, write
from prejit.runtime.observe.grafana import as_grafana


def test_the_command_writes_every_file(tmp_path, capsys):
    assert main(["observe", "init", str(tmp_path / "watch")]) == 0
    printed = capsys.readouterr().out.splitlines()
    there = sorted(str(path) for path in (tmp_path / "watch").rglob("*") if path.is_file())
    assert sorted(printed) == there
    assert len(there) == 3 + len(DASHBOARDS) + len(ALERTS)


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("wiki.example/runbooks", "write https://wiki.example/runbooks"),
        ("https:///runbooks", "write https://HOST/PATH"),
        ("", "leave it out"),
    ],
)
def test_runbooks_that_no_browser_finds_are_refused(given, hint, tmp_path, capsys):
    assert main(["observe", "init", str(tmp_path / "watch"), "--runbooks", given]) == 2
    said = capsys.readouterr().err
    assert "--runbooks: expected a URL" in said
    assert hint in said
    assert not (tmp_path / "watch").exists()


def test_an_edited_file_is_kept_and_named(tmp_path):
    write(tmp_path, runbooks="runbooks", force=False)
    edited = tmp_path / "prometheus" / "prejit.rules.yml"
    edited.write_text("mine")
    (tmp_path / "README.md").unlink()
    with pytest.raises(UsageError, match=r"prometheus/prejit\.rules\.yml") as caught:
        write(tmp_path, runbooks="runbooks", force=False)
    assert "--force" in caught.value.hint
    assert edited.read_text() == "mine"
    assert not (tmp_path / "README.md").exists()  # nothing at all is written
    write(tmp_path, runbooks="runbooks", force=True)
    assert edited.read_text() != "mine"


def test_writing_the_same_again_is_no_conflict(tmp_path):
    assert write(tmp_path, runbooks="runbooks", force=False) == write(
        tmp_path, runbooks="runbooks", force=False
    )


def test_a_file_in_the_place_of_a_directory_is_an_error_of_prejit(tmp_path):
    (tmp_path / "watch").write_text("")
    with pytest.raises(StoreError, match="watch"):
        write(tmp_path / "watch", runbooks="runbooks", force=False)


def test_every_alert_links_to_its_runbook_and_every_runbook_has_an_alert():
    found = files("https://wiki.example/runbooks/")
    rules = found["prometheus/prejit.rules.yml"]
    pages = {Path(path).stem for path in found if path.startswith("runbooks/")}
    assert pages == {alert.name for alert in ALERTS}
    for name in pages:
        assert f'"https://wiki.example/runbooks/{name}.md"' in rules
        assert found[f"runbooks/{name}.md"].startswith(f"# {name}\n\n**Means.** ")
        for part in ("**Who notices.** ", "**Look at**", "**Do**"):
            assert part in found[f"runbooks/{name}.md"], (name, part)


def test_links_between_runbooks_lead_to_one():
    found = files("runbooks")
    for path, text in found.items():
        if path.endswith(".md"):
            for link in re.findall(r"\]\(([^)]+)\)", text):
                assert f"runbooks/{link}" in found, (path, link)


def test_runbooks_name_panels_that_exist():
    titles = {panel.title for dashboard in DASHBOARDS for panel in dashboard.panels()}
    names = {dashboard.title for dashboard in DASHBOARDS}
    for path, text in files("runbooks").items():
        if path.startswith("runbooks/"):
            for name in re.findall(r"(?<!\*)\*([^*\n]+)\*(?!\*)", text):
                assert name in titles | names, (path, name)


def test_runbooks_name_commands_and_options_that_exist():
    options = {name for parameter in serve.params for name in parameter.opts}
    for path, text in files("runbooks").items():
        for command in re.findall(r"`prejit ([a-z-]+)", text):
            assert command in commands.commands, (path, command)
        for option in re.findall(r"`prejit serve (--[a-z-]+)", text):
            assert option in options, (path, option)


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.name)
def test_panels_have_their_own_place_and_number(dashboard):
    panels = as_grafana(dashboard)["panels"]
    numbers = [panel["id"] for panel in panels]
    assert len(set(numbers)) == len(panels)
    taken = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.name)
def test_every_panel_says_what_to_look_for_and_keeps_to_the_chosen_jobs(dashboard):
    for panel in dashboard.panels():
        assert panel.description.endswith(".")
        for query, _ in panel.queries:
            assert "$job" in query, panel.title
    text = json.dumps(as_grafana(dashboard))
    used = set(re.findall(r"\$\{?([a-z]\w*)\}?", text))
    variables = {one["name"] for one in as_grafana(dashboard)["templating"]["list"]}
    assert used <= variables


def test_summaries_and_queries_are_text_that_yaml_reads_as_it_is():
    import yaml

    rules = yaml.safe_load(files("runbooks")["prometheus/prejit.rules.yml"])
    found = {
        rule["alert"]: rule
        for group in rules["groups"]
        for rule in group["rules"]
        if "alert" in rule
    }
    for alert in ALERTS:
        assert found[alert.name]["expr"].strip() == alert.expr
        assert found[alert.name]["annotations"]["summary"] == alert.summary
        assert found[alert.name]["labels"]["severity"] == alert.severity
        assert found[alert.name].get("for", "") == alert.wait
