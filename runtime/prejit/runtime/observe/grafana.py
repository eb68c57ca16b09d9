"""Panels and dashboards as data, and as the JSON that Grafana imports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_COLUMNS = 24
_WIDTH, _HEIGHT = 8, 8


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel.

    Attributes:
        title: what it shows.
        description: what to look for.
        unit: Grafana's name of the unit.
        queries: PromQL, and what the legend calls each line.
        kind: Grafana's type of panel.
    """

    title: str
    description: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    kind: str = "timeseries"


@dataclass(frozen=True, slots=True)
class Dashboard:
    """One dashboard.

    Attributes:
        name: the name of its file and its identifier in Grafana.
        title: its title.
        sections: panels by the title of their row.
    """

    name: str
    title: str
    sections: tuple[tuple[str, tuple[Panel, ...]], ...]

    def panels(self) -> list[Panel]:
        """Return all panels in their order."""
        return [panel for _, panels in self.sections for panel in panels]


def as_grafana(dashboard: Dashboard) -> dict[str, Any]:
    """Return a dashboard as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, section in dashboard.sections:
        place = {"h": 1, "w": _COLUMNS, "x": 0, "y": top}
        panels.append(
            {"type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}
        )
        top += 1
        columns = _COLUMNS // _WIDTH
        for index, panel in enumerate(section):
            place = {
                "h": _HEIGHT,
                "w": _WIDTH,
                "x": index % columns * _WIDTH,
                "y": top + index // columns * _HEIGHT,
            }
            panels.append({"gridPos": place, **_panel(panel)})
        top += -(-len(section) // columns) * _HEIGHT
    for number, each in enumerate(panels, 1):
        each["id"] = number
    return {
        "uid": dashboard.name,
        "title": dashboard.title,
        "tags": ["prejit"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": _variables()},
        "annotations": {"list": []},
        "links": _links(),
        "panels": panels,
    }


_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def _panel(panel: Panel) -> dict[str, Any]:
    is_table = panel.kind == "table"
    targets = [
        {
            "refId": chr(ord("A") + index),
            "datasource": _SOURCE,
            "expr": query,
            "legendFormat": legend,
            "instant": is_table,
            "format": "table" if is_table else "time_series",
        }
        for index, (query, legend) in enumerate(panel.queries)
    ]
    found: dict[str, Any] = {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": _SOURCE,
        "targets": targets,
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "options": {},
    }
    if not is_table:
        found["fieldConfig"]["defaults"]["min"] = 0
        found["options"] = {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    return found


def _variables() -> list[dict[str, Any]]:
    """Return the choices at the top of a dashboard: the source of data, jobs, servers, models."""

    def choice(name: str, label: str, query: str) -> dict[str, Any]:
        return {
            "name": name,
            "label": label,
            "type": "query",
            "datasource": _SOURCE,
            "query": {"query": query, "refId": name},
            "refresh": 2,
            "includeAll": True,
            "multi": True,
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
        }

    return [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
        choice("job", "Job", "label_values(prejit_server_state, job)"),
        choice("instance", "Server", 'label_values(prejit_server_state{job=~"$job"}, instance)'),
        choice("model", "Model", 'label_values(prejit_build_info{job=~"$job"}, model_name)'),
    ]


def _links() -> Sequence[dict[str, Any]]:
    """Return the links from a dashboard to the others, by their tag."""
    return [
        {
            "type": "dashboards",
            "title": "prejit",
            "tags": ["prejit"],
            "includeVars": True,
            "keepTime": True,
            "asDropdown": False,
        }
    ]
