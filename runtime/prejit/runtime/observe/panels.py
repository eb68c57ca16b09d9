"""Queries of Prometheus, and the panels that several dashboards have.

A panel's description says what to look for. Every query keeps to the chosen job, instances and models.
"""

from __future__ import annotations

from prejit.runtime.observe.grafana import Panel

MODEL = 'job=~"$job", instance=~"$instance", model_name=~"$model"'
"""The labels of one model's series."""
PROCESS = 'job=~"$job", instance=~"$instance"'
"""The labels of a whole server's series."""
GENERATIONS = ', kind="generate"'
"""The further label of generations."""
CALLS = ', kind!="generate"'
"""The further label of encodings and of calls of functions."""
PROGRAM = "{{model_name}} {{program}}"
"""The legend of series by model and program: `generate`, `encode`, or a function."""


def rate(metric: str, by: str = "model_name", more: str = "") -> str:
    """Return a query of the rate of a counter."""
    return f"sum by ({by}) (rate({metric}{{{MODEL}{more}}}[$__rate_interval]))"


def gauge(metric: str, by: str = "model_name", of: str = "sum", more: str = "") -> str:
    """Return a query of a gauge."""
    return f"{of} by ({by}) ({metric}{{{MODEL}{more}}})"


def share(part: str, whole: str, by: str = "model_name", more: str = "") -> str:
    """Return a query of the quotient of two counters' rates."""
    return f"{rate(part, by, more)} / {rate(whole, by, more)}"


NAME = "{{model_name}}"


def quantiles(
    metric: str, by: str = "model_name", legend: str = NAME, more: str = ""
) -> tuple[tuple[str, str], ...]:
    """Return queries of the median, the 95th and the 99th percentile of a histogram."""
    return tuple(
        (
            f"histogram_quantile({part}, {rate(f'{metric}_bucket', f'{by}, le', more)})",
            f"{legend} p{part * 100:.0f}",
        )
        for part in (0.5, 0.95, 0.99)
    )


HERE = "{{instance}} {{model_name}}"

FIRST_TOKEN = Panel(
    "Time to first token",
    "Queue, prefill and the first decode step. If it grows and the queue does too, add replicas.",
    "s",
    quantiles("vllm:time_to_first_token_seconds"),
)
BETWEEN_TOKENS = Panel(
    "Time between tokens",
    "It grows with the rows of the batch. Long prompts that join show in the 99th percentile.",
    "s",
    quantiles("vllm:inter_token_latency_seconds"),
)
REQUESTS = Panel(
    "Requests by the reason of their end",
    "error, nan, deadline and refused burn the error budget. cancelled is neither; all others are good ends.",
    "reqps",
    ((rate("prejit_requests_total", "model_name, program, reason"), f"{PROGRAM} {{{{reason}}}}"),),
)
ERRORS = Panel(
    "Share of failed requests",
    "error, nan, deadline and refused, of all requests that clients did not cancel.",
    "percentunit",
    (
        (
            rate("prejit_requests_total", more=', reason=~"error|nan|deadline|refused"')
            + " / "
            + rate("prejit_requests_total", more=', reason!="cancelled"'),
            NAME,
        ),
    ),
)
QUEUE = Panel(
    "Requests running and waiting",
    "Waiting requests beside free slots mean that the memory budget of the cache is full.",
    "short",
    (
        (gauge("prejit_requests_running", "model_name, program"), f"{PROGRAM} running"),
        (gauge("prejit_requests_waiting", "model_name, program"), f"{PROGRAM} waiting"),
        (gauge("prejit_slots"), "{{model_name}} slots"),
    ),
)
TOKENS = Panel(
    "Tokens a second",
    "New tokens, and tokens of prompts, those from a cache included.",
    "short",
    (
        (rate("vllm:generation_tokens_total"), "{{model_name}} new"),
        (rate("vllm:prompt_tokens_total"), "{{model_name}} prompt"),
    ),
)
HITS = Panel(
    "Share of prompt tokens from a cache",
    "A sudden fall means that prompts no longer begin alike, or that prefixes are evicted.",
    "percentunit",
    ((share("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"), NAME),),
)
BUSY = Panel(
    "Busy share of the device",
    "Near 1 with a queue: the server is saturated. Far below 1 with a queue: look at the host's CPUs.",
    "percentunit",
    (
        (
            rate("prejit_device_busy_seconds_total", "instance, model_name, program"),
            f"{HERE} {{{{program}}}}",
        ),
    ),
)
WAITED = Panel(
    "Share of requests that waited for a compilation",
    "0 on machines that match a target. Anything else is a fallback or a missing bucket.",
    "percentunit",
    ((share("prejit_requests_waited_for_compile_total", "prejit_requests_total"), NAME),),
)
FALLBACKS = Panel(
    "Fallbacks by axis",
    "The axis names what the machine has and the bundle does not know.",
    "short",
    (
        (
            f"sum by (instance, axis) (prejit_fallbacks_total{{{PROCESS}}})",
            "{{instance}} {{axis}}",
        ),
    ),
)
NAN = Panel(
    "Requests that ended in NaN, an hour",
    "Any is a defect of the weights, of the cache's dtype, or of the hardware.",
    "short",
    (
        (
            "sum by (instance, model_name) "
            f'(increase(prejit_requests_total{{{MODEL}, reason="nan"}}[1h]))',
            HERE,
        ),
    ),
)
HOST_MEMORY = Panel(
    "Host memory",
    "It is flat under steady load. Mapped weights count as soon as they were read once.",
    "bytes",
    (
        (f"prejit_host_memory_bytes{{{PROCESS}}}", "{{instance}}"),
        (f"prejit_host_memory_limit_bytes{{{PROCESS}}}", "{{instance}} limit"),
    ),
)
CACHE_USAGE = Panel(
    "Used share of the KV cache",
    "The part of the cache's positions that running requests fill.",
    "percentunit",
    ((gauge("vllm:kv_cache_usage_perc", "instance, model_name", "max"), HERE),),
)
WHOLE = Panel(
    "Time of a request",
    "From the request to its result; that of a generation depends on how many tokens are asked for.",
    "s",
    quantiles("prejit_request_seconds", "model_name, program", PROGRAM),
)
ANSWERS = Panel(
    "Answers by route and status",
    "4xx are mistakes of clients, 429 and 503 are refused load, other 5xx are defects. other: unknown paths.",
    "reqps",
    (
        (
            f"sum by (route, status) (rate(prejit_http_requests_total{{{PROCESS}}}[$__rate_interval]))",
            "{{route}} {{status}}",
        ),
    ),
)
STATE = Panel(
    "State of the servers",
    "Every server is ready, but for those that start or end.",
    "short",
    ((f"sum by (state) (prejit_server_state{{{PROCESS}}})", "{{state}}"),),
)
VERSIONS = Panel(
    "What runs",
    "Bundle, target and versions of each server. Two digests of one model are a rollout.",
    "short",
    ((f"prejit_build_info{{{MODEL}}}", HERE),),
    kind="table",
)


def burn(record: str, title: str, description: str) -> Panel:
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
