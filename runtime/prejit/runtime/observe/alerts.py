"""Alert rules of Prometheus, as data.

Two objectives have burn-rate alerts over several windows (The Site Reliability Workbook, chapter 5): a fast
burn wakes somebody, a slow one makes a ticket. The other alerts name causes.
"""

from __future__ import annotations

import json
import textwrap
from dataclasses import dataclass

WINDOWS = ("5m", "30m", "1h", "2h", "6h", "1d", "3d")
"""The windows over which the shares of failed and of slow requests are recorded."""

FAILED = "model:prejit_requests_failed"
"""The recorded share of requests that failed, without those that clients cancelled."""

SLOW = "model:prejit_first_token_slow"
"""The recorded share of first tokens that came too late."""

FAILED_BUDGET = 0.001
"""The share of requests that may fail."""

SLOW_BUDGET = 0.01
"""The share of first tokens, and of calls, that may be slow."""

CALLS_SLOW = "model:prejit_call_slow"
"""The recorded share of encodings and of calls of functions whose result came too late."""

SLOW_SECONDS = "2.5"
"""A first token, or the result of a call, is slow after this time. It must be a bound of both histograms,
written as in their labels."""

_HEAD = """\
# Alert rules for servers of prejit, for Prometheus 2.40 and newer. Written by `prejit observe init`.
#
# Edit to your needs: the share of requests that may fail (0.001), the time after which a first token, or the
# result of an encoder or a function, is slow (le="2.5", in seconds), and the share that may be slow (0.01).
# severity: "page" wakes somebody, "ticket" waits for working hours.
groups:
"""


@dataclass(frozen=True, slots=True)
class Record:
    """An expression that Prometheus evaluates ahead, under a name of its own.

    Attributes:
        name: the name of the new series.
        expr: PromQL.
    """

    name: str
    expr: str


@dataclass(frozen=True, slots=True)
class Alert:
    """An alert.

    Attributes:
        name: its name, and that of its runbook.
        severity: `page` or `ticket`.
        wait: how long the expression must hold before the alert fires; empty: not at all.
        summary: one line for people, with Prometheus' own templates.
        expr: PromQL.
    """

    name: str
    severity: str
    wait: str
    summary: str
    expr: str


def _failed(window: str) -> str:
    return f"""\
sum by (job, model_name) (rate(prejit_requests_total{{reason=~"error|nan|deadline|refused"}}[{window}]))
/
sum by (job, model_name) (rate(prejit_requests_total{{reason!="cancelled"}}[{window}]))"""


def _slow(metric: str, window: str, labels: str = "") -> str:
    return f"""\
1 -
sum by (job, model_name) (rate({metric}_bucket{{le="{SLOW_SECONDS}"{labels}}}[{window}]))
/
sum by (job, model_name) (rate({metric}_count{{{labels.removeprefix(", ")}}}[{window}]))"""


def _burn(record: str, *windows: tuple[str, str, str]) -> str:
    """Return an expression that holds where one pair of windows is above its threshold.

    The short window ends the alert soon after its cause has ended.
    """
    return "\nor\n".join(
        f"""\
(
  {record}:ratio_rate{long} > {threshold}
  and
  {record}:ratio_rate{short} > {threshold}
)"""
        for long, short, threshold in windows
    )


def _fast(record: str, budget: float) -> str:
    """Return the condition of a burn that spends 2 % of a month's budget in an hour, or 5 % in six."""
    return _burn(record, ("1h", "5m", f"14.4 * {budget}"), ("6h", "30m", f"6 * {budget}"))


def _slowly(record: str, budget: float) -> str:
    """Return the condition of a burn that spends 10 % of a month's budget in one day, or in three."""
    return _burn(record, ("1d", "2h", f"3 * {budget}"), ("3d", "6h", f"{budget}"))


RECORDS = tuple(
    record
    for window in WINDOWS
    for record in (
        Record(f"{FAILED}:ratio_rate{window}", _failed(window)),
        Record(f"{SLOW}:ratio_rate{window}", _slow("vllm:time_to_first_token_seconds", window)),
        Record(
            f"{CALLS_SLOW}:ratio_rate{window}",
            _slow("prejit_request_seconds", window, ', kind!="generate"'),
        ),
    )
)

_SERVER = "{{ $labels.instance }}"
_MODEL = "{{ $labels.model_name }}"
_SHARE = "{{ $value | humanizePercentage }}"
_FAIL = f"{_MODEL}: {_SHARE} of the requests fail"
_LATE = f"{_MODEL}: {_SHARE} of the first tokens come after {SLOW_SECONDS} s"
_CALLS_LATE = f"{_MODEL}: {_SHARE} of the encodings and calls take more than {SLOW_SECONDS} s"
_PROGRAM = "{{ $labels.program }}"

ALERTS = (
    Alert(
        "PrejitDown",
        "page",
        "2m",
        f"{_SERVER} does not answer Prometheus",
        'up{job=~".*prejit.*"} == 0',
    ),
    Alert(
        "PrejitNotReady",
        "page",
        "5m",
        f"{_SERVER} loads or compiles for more than 5 minutes",
        'sum by (job, instance) (prejit_server_state{state=~"loading|compiling"}) > 0',
    ),
    Alert("PrejitErrorBudgetBurnsFast", "page", "2m", _FAIL, _fast(FAILED, FAILED_BUDGET)),
    Alert("PrejitErrorBudgetBurnsSlowly", "ticket", "15m", _FAIL, _slowly(FAILED, FAILED_BUDGET)),
    Alert("PrejitFirstTokenBudgetBurnsFast", "page", "2m", _LATE, _fast(SLOW, SLOW_BUDGET)),
    Alert("PrejitFirstTokenBudgetBurnsSlowly", "ticket", "15m", _LATE, _slowly(SLOW, SLOW_BUDGET)),
    Alert("PrejitCallBudgetBurnsFast", "page", "2m", _CALLS_LATE, _fast(CALLS_SLOW, SLOW_BUDGET)),
    Alert(
        "PrejitCallBudgetBurnsSlowly",
        "ticket",
        "15m",
        _CALLS_LATE,
        _slowly(CALLS_SLOW, SLOW_BUDGET),
    ),
    Alert(
        "PrejitTokensStopped",
        "page",
        "5m",
        f"{_SERVER} {_MODEL}: requests run and no token comes",
        """\
sum by (job, instance, model_name) (prejit_requests_running{kind="generate"}) > 0
and
sum by (job, instance, model_name) (rate(vllm:generation_tokens_total[5m])) == 0""",
    ),
    Alert(
        "PrejitCallsStopped",
        "page",
        "5m",
        f"{_SERVER} {_MODEL}: calls of {_PROGRAM} run and none ends",
        """\
sum by (job, instance, model_name, program) (prejit_requests_running{kind!="generate"}) > 0
and
sum by (job, instance, model_name, program) (rate(prejit_requests_total{kind!="generate"}[5m])) == 0""",
    ),
    Alert(
        "PrejitQueueFull",
        "page",
        "5m",
        f"{_SERVER} {_MODEL}: the queue of {_PROGRAM} is {_SHARE} full",
        """\
sum by (job, instance, model_name, program) (prejit_requests_waiting)
/
sum by (job, instance, model_name, program) (prejit_queue_size)
> 0.8""",
    ),
    Alert(
        "PrejitSaturated",
        "ticket",
        "30m",
        f"{_SERVER} {_MODEL}: the device is busy with {_PROGRAM} all the time and requests wait",
        """\
sum by (job, instance, model_name, program) (rate(prejit_device_busy_seconds_total[15m])) > 0.95
and
sum by (job, instance, model_name, program) (avg_over_time(prejit_requests_waiting[15m])) > 1""",
    ),
    Alert(
        "PrejitRequestsCompile",
        "ticket",
        "",
        f"{_MODEL}: {_SHARE} of the requests waited for a compilation",
        """\
sum by (job, model_name) (increase(prejit_requests_waited_for_compile_total[15m]))
/
sum by (job, model_name) (increase(prejit_requests_total[15m]))
> 0""",
    ),
    Alert(
        "PrejitCompileTime",
        "ticket",
        "",
        f"{_SERVER} {_MODEL}: compiled for {{{{ $value | humanizeDuration }}}} within an hour",
        "sum by (job, instance, model_name) (increase(prejit_compile_seconds_total[1h])) > 60",
    ),
    Alert(
        "PrejitFallback",
        "ticket",
        "",
        f"{_SERVER}: no program of the bundle fits this axis: {{{{ $labels.axis }}}}",
        "sum by (job, instance, axis) (prejit_fallbacks_total) > 0",
    ),
    Alert(
        "PrejitNaN",
        "page",
        "",
        f"{_SERVER} {_MODEL}: requests end in NaN",
        'sum by (job, instance, model_name) (increase(prejit_requests_total{reason="nan"}[15m])) > 0',
    ),
    Alert(
        "PrejitPrefixCacheMisses",
        "ticket",
        "30m",
        f"{_MODEL}: the share of prompt tokens from a cache fell to {_SHARE}",
        """\
(
  sum by (job, model_name) (rate(vllm:prefix_cache_hits_total[1h]))
  /
  sum by (job, model_name) (rate(vllm:prefix_cache_queries_total[1h]))
)
< 0.5 *
(
  sum by (job, model_name) (rate(vllm:prefix_cache_hits_total[1d]))
  /
  sum by (job, model_name) (rate(vllm:prefix_cache_queries_total[1d]))
  > 0.1
)""",
    ),
    Alert(
        "PrejitCacheMemoryFull",
        "ticket",
        "15m",
        f"{_SERVER} {_MODEL}: requests wait and the KV caches use {_SHARE} of their memory",
        """\
sum by (job, instance, model_name) (prejit_kv_cache_bytes)
/
sum by (job, instance, model_name) (prejit_kv_cache_budget_bytes)
> 0.95
and
sum by (job, instance, model_name) (prejit_requests_waiting{kind="generate"}) > 0""",
    ),
    Alert(
        "PrejitHostMemoryGrows",
        "ticket",
        "1h",
        f"{_SERVER}: host memory grows by {{{{ $value | humanize1024 }}}}B an hour",
        """\
deriv(prejit_host_memory_bytes[1h]) * 3600 > 0.05 * prejit_host_memory_bytes
and on (job, instance)
time() - process_start_time_seconds > 7200""",
    ),
    Alert(
        "PrejitHostMemoryHigh",
        "page",
        "10m",
        f"{_SERVER}: host memory is at {_SHARE} of its limit",
        "prejit_host_memory_bytes / prejit_host_memory_limit_bytes > 0.9",
    ),
)


def as_rules(runbooks: str) -> str:
    """Return the file of rules.

    Args:
        runbooks: where the runbooks are; each alert links to its own below it.
    """
    lines = ["  - name: prejit.records", "    rules:"]
    for record in RECORDS:
        lines += [f"      - record: {record.name}", *_expression(record.expr)]
    lines += ["", "  - name: prejit.alerts", "    rules:"]
    for alert in ALERTS:
        lines += [f"      - alert: {alert.name}", *_expression(alert.expr)]
        if alert.wait:
            lines.append(f"        for: {alert.wait}")
        lines += [
            "        labels:",
            f"          severity: {alert.severity}",
            "        annotations:",
            # A string of JSON is one of YAML.
            f"          summary: {json.dumps(alert.summary)}",
            f"          runbook_url: {json.dumps(f'{runbooks}/{alert.name}.md')}",
        ]
    return _HEAD + "\n".join(lines) + "\n"


def _expression(expr: str) -> list[str]:
    return ["        expr: |", *textwrap.indent(expr, " " * 10).splitlines()]
