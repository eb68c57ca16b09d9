"""Dashboards of Grafana, as data: sections of panels, each with its queries.

A panel's description says what to look for. Every query keeps to the chosen job, instances and models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_MODEL = 'job=~"$job", instance=~"$instance", model_name=~"$model"'
_PROCESS = 'job=~"$job", instance=~"$instance"'
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


def _rate(metric: str, by: str = "model_name", more: str = "") -> str:
    return f"sum by ({by}) (rate({metric}{{{_MODEL}{more}}}[$__rate_interval]))"


def _gauge(metric: str, by: str = "model_name", of: str = "sum") -> str:
    return f"{of} by ({by}) ({metric}{{{_MODEL}}})"


def _share(part: str, whole: str) -> str:
    return f"{_rate(part)} / {_rate(whole)}"


def _quantiles(metric: str) -> tuple[tuple[str, str], ...]:
    """Return queries of the median, the 95th and the 99th percentile of a histogram."""
    return tuple(
        (
            f"histogram_quantile({share}, {_rate(f'{metric}_bucket', 'model_name, le')})",
            f"{{{{model_name}}}} p{share * 100:.0f}",
        )
        for share in (0.5, 0.95, 0.99)
    )


_NAME = "{{model_name}}"
_HERE = "{{instance}} {{model_name}}"

_FIRST_TOKEN = Panel(
    "Time to first token",
    "Queue, prefill and the first decode step. If it grows and the queue does too, add replicas.",
    "s",
    _quantiles("vllm:time_to_first_token_seconds"),
)
_BETWEEN_TOKENS = Panel(
    "Time between tokens",
    "It grows with the rows of the batch. Long prompts that join show in the 99th percentile.",
    "s",
    _quantiles("vllm:inter_token_latency_seconds"),
)
_REQUESTS = Panel(
    "Requests by the reason of their end",
    "stop, length and context are good ends. error, nan, deadline and refused burn the error budget.",
    "reqps",
    ((_rate("prejit:requests_total", "model_name, reason"), "{{model_name}} {{reason}}"),),
)
_ERRORS = Panel(
    "Share of failed requests",
    "error, nan, deadline and refused, of all requests that clients did not cancel.",
    "percentunit",
    (
        (
            _rate("prejit:requests_total", more=', reason=~"error|nan|deadline|refused"')
            + " / "
            + _rate("prejit:requests_total", more=', reason!="cancelled"'),
            _NAME,
        ),
    ),
)
_QUEUE = Panel(
    "Requests running and waiting",
    "Waiting requests beside free slots mean that the memory budget of the cache is full.",
    "short",
    (
        (_gauge("vllm:num_requests_running"), "{{model_name}} running"),
        (_gauge("vllm:num_requests_waiting"), "{{model_name}} waiting"),
        (_gauge("prejit:slots"), "{{model_name}} slots"),
    ),
)
_TOKENS = Panel(
    "Tokens a second",
    "New tokens, and tokens of prompts, those from a cache included.",
    "short",
    (
        (_rate("vllm:generation_tokens_total"), "{{model_name}} new"),
        (_rate("vllm:prompt_tokens_total"), "{{model_name}} prompt"),
    ),
)
_HITS = Panel(
    "Share of prompt tokens from a cache",
    "A sudden fall means that prompts no longer begin alike, or that prefixes are evicted.",
    "percentunit",
    ((_share("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"), _NAME),),
)
_BUSY = Panel(
    "Busy share of the device",
    "Near 1 with a queue: the server is saturated. Far below 1 with a queue: look at the host's CPUs.",
    "percentunit",
    ((_rate("prejit:device_busy_seconds_total", "instance, model_name"), _HERE),),
)
_WAITED = Panel(
    "Share of requests that waited for a compilation",
    "0 on machines that match a target. Anything else is a fallback or a missing bucket.",
    "percentunit",
    ((_share("prejit:requests_waited_for_compile_total", "prejit:requests_total"), _NAME),),
)
_FALLBACKS = Panel(
    "Fallbacks by axis",
    "The axis names what the machine has and the bundle does not know.",
    "short",
    (
        (
            f"sum by (instance, axis) (prejit:fallbacks_total{{{_PROCESS}}})",
            "{{instance}} {{axis}}",
        ),
    ),
)
_NAN = Panel(
    "Requests that ended in NaN, an hour",
    "Any is a defect of the weights, of the cache's dtype, or of the hardware.",
    "short",
    (
        (
            f"sum by (instance, model_name) (increase(prejit:nan_requests_total{{{_MODEL}}}[1h]))",
            _HERE,
        ),
    ),
)
_HOST_MEMORY = Panel(
    "Host memory",
    "It is flat under steady load. Mapped weights count as soon as they were read once.",
    "bytes",
    (
        (f"prejit:host_memory_bytes{{{_PROCESS}}}", "{{instance}}"),
        (f"prejit:host_memory_limit_bytes{{{_PROCESS}}}", "{{instance}} limit"),
    ),
)
_CACHE_USAGE = Panel(
    "Used share of the KV cache",
    "The part of the cache's positions that running requests fill.",
    "percentunit",
    ((_gauge("vllm:kv_cache_usage_perc", "instance, model_name", "max"), _HERE),),
)
_STATE = Panel(
    "State of the servers",
    "Every server is ready, but for those that start or end.",
    "short",
    ((f"sum by (state) (prejit:server_state{{{_PROCESS}}})", "{{state}}"),),
)
_VERSIONS = Panel(
    "What runs",
    "Bundle, target and versions of each server. Two digests of one model are a rollout.",
    "short",
    ((f"prejit:build_info{{{_MODEL}}}", _HERE),),
    kind="table",
)


def _burn(record: str, title: str, description: str) -> Panel:
    """Return a panel of a recorded share over several windows."""
    windows = ("5m", "1h", "6h", "3d")
    return Panel(
        title,
        description,
        "percentunit",
        tuple(
            (
                f'{record}:ratio_rate{window}{{job=~"$job", model_name=~"$model"}}',
                f"{{{{model_name}}}} {window}",
            )
            for window in windows
        ),
    )


OVERVIEW = Dashboard(
    "prejit-overview",
    "prejit: overview",
    (
        ("Load", (_TOKENS, _QUEUE, _REQUESTS)),
        (
            "Latency",
            (
                _FIRST_TOKEN,
                _BETWEEN_TOKENS,
                Panel(
                    "Time of a request",
                    "From the call to the last token; it depends on how many tokens are asked for.",
                    "s",
                    _quantiles("vllm:e2e_request_latency_seconds"),
                ),
            ),
        ),
        ("Capacity", (_BUSY, _CACHE_USAGE, _HITS, _HOST_MEMORY, _ERRORS, _VERSIONS)),
    ),
)
"""Is the service well, and how much does it do."""

ON_CALL = Dashboard(
    "prejit-on-call",
    "prejit: on call",
    (
        (
            "Alerts",
            (
                Panel(
                    "Alerts",
                    "Each alert links to its runbook.",
                    "short",
                    (('ALERTS{alertname=~"Prejit.*", job=~"$job"}', "{{alertname}}"),),
                    kind="table",
                ),
                _STATE,
                Panel(
                    "Servers that answer Prometheus",
                    "A server that is down, or hangs, is missing here.",
                    "short",
                    ((f"sum by (job) (up{{{_PROCESS}}})", "{{job}}"),),
                ),
            ),
        ),
        (
            "Error budgets",
            (
                _burn(
                    "model:prejit_requests_failed",
                    "Failed requests",
                    "The budget is 0.1 %. The fast alert fires at 1.44 % over an hour.",
                ),
                _burn(
                    "model:prejit_first_token_slow",
                    "First tokens after 2.5 s",
                    "The budget is 1 %. The fast alert fires at 14.4 % over an hour.",
                ),
                _REQUESTS,
            ),
        ),
        ("Causes", (_QUEUE, _FIRST_TOKEN, _BUSY, _WAITED, _FALLBACKS, _NAN, _HOST_MEMORY, _TOKENS)),
    ),
)
"""What is broken, and where to look first."""

DEBUG = Dashboard(
    "prejit-debug",
    "prejit: debug",
    (
        (
            "Programs and starts",
            (
                Panel(
                    "Programs by how they became ready",
                    "Under AOT all are loaded or unused. compiled and compiling cost requests their time.",
                    "short",
                    (
                        (
                            _gauge("prejit:programs", "model_name, source"),
                            "{{model_name}} {{source}}",
                        ),
                    ),
                ),
                Panel(
                    "Time spent compiling",
                    "Sum over all programs since the start of each server.",
                    "s",
                    ((_gauge("prejit:compile_seconds_total", "instance, model_name"), _HERE),),
                ),
                Panel(
                    "Parts of a start",
                    "From the start of the process to its first result, the median of all servers.",
                    "s",
                    (
                        (
                            "quantile by (model_name, part) (0.5, "
                            f"prejit:start_seconds{{{_MODEL}}})",
                            "{{model_name}} {{part}}",
                        ),
                    ),
                ),
                _WAITED,
                _FALLBACKS,
                Panel(
                    "Machines that match their target",
                    "0: this server compiles all of its programs itself.",
                    "short",
                    ((_gauge("prejit:target_matched", "instance, model_name", "min"), _HERE),),
                ),
            ),
        ),
        (
            "Batches",
            (
                Panel(
                    "Filled rows of decode buckets",
                    "Low while the queue is long: requests do not get into the batch.",
                    "percentunit",
                    ((_share("prejit:batch_rows_total", "prejit:batch_slots_total"), _NAME),),
                ),
                Panel(
                    "Padding",
                    "The share of computed positions that belonged to no request.",
                    "percentunit",
                    (
                        (
                            "1 - "
                            + _share(
                                "prejit:useful_positions_total", "prejit:computed_positions_total"
                            ),
                            _NAME,
                        ),
                    ),
                ),
                Panel(
                    "Steps a second",
                    "Steps compute prompts, decode, or both. Fewer at the same load: each takes longer.",
                    "ops",
                    ((_rate("prejit:steps_total"), _NAME),),
                ),
                Panel(
                    "Rows of a shared run",
                    "Rows of callers in one run of an encoder or a function.",
                    "short",
                    (
                        (
                            _rate("prejit:microbatch_rows_total", "model_name, program")
                            + " / "
                            + _rate("prejit:microbatch_batches_total", "model_name, program"),
                            "{{model_name}} {{program}}",
                        ),
                    ),
                ),
                Panel(
                    "Padding of shared runs",
                    "Rows a second that only filled the bucket.",
                    "short",
                    (
                        (
                            _rate("prejit:microbatch_padded_rows_total", "model_name, program"),
                            "{{model_name}} {{program}}",
                        ),
                    ),
                ),
                _QUEUE,
            ),
        ),
        (
            "Parts of a request",
            (
                Panel(
                    "Time in the queue",
                    "Requests without a free slot, or without memory for their cache.",
                    "s",
                    _quantiles("vllm:request_queue_time_seconds"),
                ),
                Panel(
                    "Time of prefill",
                    "It follows the length of prompts and the share that is cached.",
                    "s",
                    _quantiles("vllm:request_prefill_time_seconds"),
                ),
                Panel(
                    "Time of decode",
                    "It follows the number of new tokens and the rows of the batch.",
                    "s",
                    _quantiles("vllm:request_decode_time_seconds"),
                ),
                Panel(
                    "Tokens of a prompt",
                    "A new kind of client shows here first.",
                    "short",
                    _quantiles("vllm:request_prompt_tokens"),
                ),
                Panel(
                    "New tokens of a request",
                    "Few, with the reason length: clients ask for too few.",
                    "short",
                    _quantiles("vllm:request_generation_tokens"),
                ),
                _HITS,
            ),
        ),
        (
            "Memory and process",
            (
                Panel(
                    "Memory of caches",
                    "A request waits if its cache would exceed the budget.",
                    "bytes",
                    (
                        (_gauge("prejit:kv_cache_bytes", "instance, model_name"), f"{_HERE} KV"),
                        (
                            _gauge("prejit:kv_cache_budget_bytes", "instance, model_name"),
                            f"{_HERE} KV budget",
                        ),
                        (
                            _gauge("prejit:prefix_cache_bytes", "instance, model_name"),
                            f"{_HERE} prefixes",
                        ),
                        (
                            _gauge("prejit:prefix_cache_budget_bytes", "instance, model_name"),
                            f"{_HERE} prefix budget",
                        ),
                    ),
                ),
                Panel(
                    "Peak device memory",
                    "Weights, caches and temporary arrays. Absent on CPUs.",
                    "bytes",
                    ((_gauge("prejit:device_memory_bytes", "instance, model_name", "max"), _HERE),),
                ),
                _HOST_MEMORY,
                Panel(
                    "CPUs in use",
                    "CPU seconds a second of the process.",
                    "short",
                    (
                        (
                            f"rate(process_cpu_seconds_total{{{_PROCESS}}}[$__rate_interval])",
                            "{{instance}}",
                        ),
                    ),
                ),
                Panel(
                    "Open files",
                    "Connections and mapped files. Steady growth is a leak.",
                    "short",
                    ((f"process_open_fds{{{_PROCESS}}}", "{{instance}}"),),
                ),
                _NAN,
            ),
        ),
    ),
)
"""Why it is slow: programs, batches, parts of requests, memory."""

DASHBOARDS = (OVERVIEW, ON_CALL, DEBUG)


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
        choice("job", "Job", "label_values(prejit:server_state, job)"),
        choice("instance", "Server", 'label_values(prejit:server_state{job=~"$job"}, instance)'),
        choice("model", "Model", 'label_values(prejit:build_info{job=~"$job"}, model_name)'),
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
