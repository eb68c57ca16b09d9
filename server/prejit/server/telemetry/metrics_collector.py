"""Metrics for Prometheus: what the engines of all served bundles measure, under names that others query.

The names that begin with `vllm:` are vLLM's, with its labels and units: its dashboards and the Gateway API
Inference Extension query them (vllm/v1/metrics/loggers.py). The others begin with `prejit_` and follow the
rules of Prometheus, which keep the colon for recorded series (`promtool check metrics`). See
docs/operations.md for those that somebody should watch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, final, get_args

from prometheus_client import CollectorRegistry, ProcessCollector, exposition
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from prejit.runtime.fallback_reporting import fallback_counts
from prejit.server.engine.engine_metrics import EngineMetrics, HistogramValue, RequestMetrics
from prejit.server.engine.memory import host_memory_bytes, host_memory_limit_bytes
from prejit.server.served.served import CanaryShare, Outcome, State
from prejit.server.served.served_adapters import adapters_of
from prejit.server.telemetry.build_info import builds_metric

if TYPE_CHECKING:
    from prejit.runtime.start_report import StartReport
    from prejit.server.served.served import Models, Served


_T = TypeVar("_T")


@dataclass(frozen=True)  # with slots `_Counter[int](...)` is a TypeError in Python 3.11
class _Metric(Generic[_T]):
    """A metric with one value for each bundle, or for each kind of its requests.

    Attributes:
        name, help: as Prometheus shows them.
        of: returns the value, or the values for one more label; None is left out.
        label: that label; empty: there is none.
    """

    family: ClassVar[Any]
    name: str
    help: str
    of: Callable[[_T], HistogramValue | Mapping[str, float] | float | None]
    label: str = ""


class _Gauge(_Metric[_T]):
    family = GaugeMetricFamily


class _Counter(_Metric[_T]):
    family = CounterMetricFamily


class _Histogram(_Metric[_T]):
    family = HistogramMetricFamily


SOURCES = ("loaded", "compiled", "kept", "compiling", "unused")
"""The ways in which a program becomes ready."""

_VLLM_REASONS = {
    "stop": ("stop", "mask", "done"),
    "length": ("length", "context"),
    "abort": ("cancelled", "deadline"),
    "error": ("error", "nan"),
}
"""vLLM's reasons and ours. vLLM does not count requests that it refuses."""


def _vllm_finished(metrics: EngineMetrics) -> dict[str, float]:
    finished = metrics.finished
    return {
        theirs: sum(finished[reason] for reason in ours) for theirs, ours in _VLLM_REASONS.items()
    }


_VLLM: tuple[_Metric[EngineMetrics], ...] = (
    _Gauge("vllm:num_requests_running", "Requests that run.", lambda m: m.running),
    _Gauge("vllm:num_requests_waiting", "Requests in the queue.", lambda m: m.waiting),
    _Gauge(
        "vllm:kv_cache_usage_perc",
        "Share of the KV cache's positions that live requests use, 0 to 1.",
        lambda m: m.kv_cache_usage,
    ),
    _Gauge(
        "vllm:gpu_cache_usage_perc",
        "The same, by the name that dashboards and gateways of 2025 query.",
        lambda m: m.kv_cache_usage,
    ),
    _Gauge(
        "vllm:engine_sleep_state",
        "1 for the state of the engine; asleep it keeps the weights only, in mapped files.",
        lambda m: {
            "awake": not m.sleep.is_sleeping,
            "weights_offloaded": m.sleep.is_sleeping,
            "discard_all": 0,
        },
        "sleep_state",
    ),
    _Counter(
        "vllm:prompt_tokens",
        "Tokens of all prompts and sentences that were read, cached ones included.",
        lambda m: m.prompt_tokens + m.encoded_tokens,
    ),
    _Counter("vllm:generation_tokens", "New tokens.", lambda m: m.generation_tokens),
    _Counter(
        "vllm:prefix_cache_queries",
        "Tokens of prompts that were looked up in the caches.",
        lambda m: m.prompt_tokens,
    ),
    _Counter(
        "vllm:prefix_cache_hits",
        "Tokens of prompts that were in a cache already.",
        lambda m: m.cached_prompt_tokens,
    ),
    _Counter(
        "vllm:request_success",
        "Requests that ended, by vLLM's reasons.",
        _vllm_finished,
        "finished_reason",
    ),
    _Histogram(
        "vllm:time_to_first_token_seconds",
        "Time from a request to its first token.",
        lambda m: m.first_token_seconds,
    ),
    _Histogram(
        "vllm:inter_token_latency_seconds",
        "Time from one token of a request to the next.",
        lambda m: m.inter_token_seconds,
    ),
    _Histogram(
        "vllm:time_per_output_token_seconds",
        "The same, by the name that dashboards of 2025 query.",
        lambda m: m.inter_token_seconds,
    ),
    _Histogram(
        "vllm:e2e_request_latency_seconds",
        "Time from a request to its last token, or to its result.",
        lambda m: m.whole_seconds,
    ),
    _Histogram(
        "vllm:request_queue_time_seconds",
        "Time from a request until it runs.",
        lambda m: m.queue_seconds,
    ),
    _Histogram(
        "vllm:request_prefill_time_seconds",
        "Time in which a prompt is computed.",
        lambda m: m.prefill_seconds,
    ),
    _Histogram(
        "vllm:request_decode_time_seconds",
        "Time of the decode calls of a request.",
        lambda m: m.decode_seconds,
    ),
    _Histogram(
        "vllm:request_prompt_tokens",
        "Tokens of a prompt, or of a sentence.",
        lambda m: m.prompt_length,
    ),
    _Histogram(
        "vllm:request_generation_tokens", "New tokens of a request.", lambda m: m.new_tokens
    ),
)
_BUNDLES: tuple[_Metric[EngineMetrics], ...] = (
    _Gauge(
        "prejit_slots",
        "Generations that can run at a time; absent without a decoder.",
        lambda m: m.slots,
    ),
    _Gauge("prejit_kv_cache_bytes", "Memory of the KV caches.", lambda m: m.cache_bytes),
    _Gauge(
        "prejit_kv_cache_budget_bytes",
        "The most memory that KV caches may use; absent without a limit.",
        lambda m: m.cache_budget_bytes,
    ),
    _Gauge("prejit_prefix_cache_bytes", "Memory of cached prefixes.", lambda m: m.prefix_bytes),
    _Gauge(
        "prejit_prefix_cache_budget_bytes",
        "The most memory that cached prefixes may use.",
        lambda m: m.prefix_budget_bytes,
    ),
    _Gauge(
        "prejit_device_memory_bytes",
        "Peak memory in use on the bundle's accelerator; absent on a CPU.",
        lambda m: m.device_memory_bytes,
    ),
    _Counter("prejit_sleeps", "Times that the bundle went to sleep.", lambda m: m.sleep.sleeps),
    _Counter("prejit_wakes", "Times that the bundle woke up.", lambda m: m.sleep.wakes),
    _Histogram(
        "prejit_wake_seconds",
        "Time from the request that found the bundle asleep until its first run had ended.",
        lambda m: m.sleep.wake_seconds,
    ),
    _Counter(
        "prejit_compile_seconds",
        "Time that compiling took; 0 if every program was loaded.",
        lambda m: m.compile_seconds,
    ),
    _Gauge(
        "prejit_programs",
        "Programs by how they became ready: loaded, compiled, kept, compiling, unused.",
        lambda m: {source: m.programs.get(source, 0) for source in SOURCES},
        "source",
    ),
)
_REQUESTS: tuple[_Metric[RequestMetrics], ...] = (
    _Gauge("prejit_requests_running", "Requests that run.", lambda m: m.running),
    _Gauge("prejit_requests_waiting", "Requests in the queue.", lambda m: m.waiting),
    _Gauge("prejit_queue_size", "Requests that can wait at a time.", lambda m: m.queue_size),
    _Counter(
        "prejit_requests_waited_for_compile",
        "Requests that ended and waited for the compilation of a program.",
        lambda m: m.waited_for_compile,
    ),
    _Counter(
        "prejit_device_busy_seconds",
        "Time in which a program ran for these requests.",
        lambda m: m.busy_seconds,
    ),
    _Counter(
        "prejit_runs",
        "Runs of the program, which requests share: the steps of a batch of generations.",
        lambda m: m.runs,
    ),
    _Counter(
        "prejit_rows",
        "Rows of requests, summed over the runs; 0 for a function without a batch axis.",
        lambda m: m.rows,
    ),
    _Counter(
        "prejit_padded_rows",
        "Rows that only filled the bucket, summed over the runs.",
        lambda m: m.padded_rows,
    ),
    _Counter(
        "prejit_useful_positions",
        "Positions of tokens that were computed for requests that ended; 0 for a function.",
        lambda m: m.useful_positions,
    ),
    _Counter(
        "prejit_computed_positions",
        "Positions that were computed for requests that ended, padding included.",
        lambda m: m.computed_positions,
    ),
    _Counter(
        "prejit_requests", "Requests that ended, by the reason.", lambda m: m.finished, "reason"
    ),
    _Histogram(
        "prejit_request_queue_seconds",
        "Time from a request until it runs.",
        lambda m: m.queue_seconds,
    ),
    _Histogram(
        "prejit_request_run_seconds",
        "Time in which a request is computed.",
        lambda m: m.run_seconds,
    ),
    _Histogram(
        "prejit_request_seconds", "Time from a request to its result.", lambda m: m.whole_seconds
    ),
)


_HTTP_REQUESTS = _Counter[int](
    "prejit_http_requests",
    "Requests of clients by route and status, without those for probes and the page.",
    lambda count: count,
)
_HTTP_SECONDS = _Histogram[HistogramValue](
    "prejit_http_request_seconds",
    "Time from a request of a client to the end of its answer.",
    lambda value: value,
)
_SERVER: tuple[_Metric[Models], ...] = (
    _Gauge(
        "prejit_host_memory_bytes",
        "Resident memory of this process.",
        lambda _: host_memory_bytes(),
    ),
    _Gauge(
        "prejit_host_memory_limit_bytes",
        "Memory that this process may use: its container's limit, or the machine's memory.",
        lambda _: host_memory_limit_bytes(),
    ),
    _Gauge(
        "prejit_server_state",
        "1 for the state of the server.",
        lambda models: {state: state == models.state for state in get_args(State)},
        "state",
    ),
    _Counter(
        "prejit_fallbacks",
        "Fallbacks to compiling here, by the axis that did not match.",
        lambda _: fallback_counts(),
        "axis",
    ),
    _Counter(
        "prejit_log_lines_lost",
        "Lines of the log of requests that could not be written.",
        lambda models: models.log_lines_lost,
    ),
)
"""Metrics of the process, which all bundles of a server share."""

_MATCHED = _Gauge["Served"](
    "prejit_target_matched",
    "1 if this machine matches the target of the bundle, 0 if programs are compiled here.",
    lambda one: one.bundle.matched,
)
_WRONG = _Gauge[bool](
    "prejit_wrong_answers",
    "1 while a golden answer of the bundle is wrong, so that the server is not ready.",
    lambda is_wrong: is_wrong,
)
_SWAPS = _Counter[int](
    "prejit_swaps",
    "Swaps of a model's bundle by outcome: after a failed one, the bundle before goes on.",
    lambda count: count,
)
_CANARY: tuple[_Metric[CanaryShare], ...] = (
    _Gauge(
        "prejit_canary_share",
        "Share of requests that go to a release which is tried, 0 to 1; absent without one.",
        lambda canary: canary.share,
    ),
    _Counter(
        "prejit_canary_requests",
        "Requests that a release answered which is tried, and those that failed there with status 500.",
        lambda canary: {each: canary.counts[each] for each in ("answered", "failed")},
        "outcome",
    ),
)
_CANARY_ENDS = _Counter[int](
    "prejit_canaries",
    "Releases that were tried, by outcome: promoted or rolled_back.",
    lambda count: count,
)
_ODD_RUNS = _Counter[int](
    "prejit_odd_runs",
    "Runs of a program that returned a NaN or an infinity, where --check-finite looks for them.",
    lambda count: count,
)
_ADAPTER_REQUESTS = _Counter[int](
    "prejit_adapter_requests",
    "Requests that chose an adapter, of each that is loaded.",
    lambda count: count,
)
_START_PARTS = ("process", "imports", "reading", "verifying", "loading", "first_run")
_START = _Gauge["StartReport"](
    "prejit_start_seconds",
    "Time from the start of the process to the first result, by part, without idle time.",
    lambda start: {part: getattr(start, f"{part}_seconds") for part in _START_PARTS},
    "part",
)


@final
class EngineCollector(Collector):
    """Turns the metrics of all served bundles into families of Prometheus, anew for each scrape."""

    def __init__(self, models: Models) -> None:
        """Read these bundles. They may still be loading."""
        self._models = models
        self._starts: dict[str, StartReport] = {}

    def collect(self) -> Iterator[Metric]:
        """Yield every family."""
        served = list(self._models)
        each = [(one.name, one.engine.metrics()) for one in served]
        vllm = [((name, "0"), metrics) for name, metrics in each]
        ours = [((name,), metrics) for name, metrics in each]
        requests = [
            ((name, one.kind, one.program), one)
            for name, metrics in each
            for one in metrics.requests
        ]
        yield from _families(_VLLM, ("model_name", "engine"), vllm)
        yield from _families(_BUNDLES, ("model_name",), ours)
        yield from _families(_REQUESTS, ("model_name", "kind", "program"), requests)
        answers, seconds = self._models.http.snapshot()
        counts = [((route, str(status)), count) for (route, status), count in answers.items()]
        yield from _families([_HTTP_REQUESTS], ("route", "status"), counts)
        times = [((route,), each) for route, each in seconds.items()]
        yield from _families([_HTTP_SECONDS], ("route",), times)
        yield from _families(_SERVER, (), [((), self._models)])
        yield from _families([_MATCHED], ("model_name",), [((one.name,), one) for one in served])
        wrong = [((one.name,), one.name in self._models.wrong) for one in served]
        yield from _families([_WRONG], ("model_name",), wrong)
        # Each outcome has a value from the beginning: alerts see no growth in a series that is new.
        swaps = [
            ((one.name, outcome), self._models.swaps[one.name, outcome])
            for one in served
            for outcome in get_args(Outcome)
        ]
        yield from _families([_SWAPS], ("model_name", "outcome"), swaps)
        canaries = [((name,), one) for name, one in [*self._models.canaries.items()]]
        yield from _families(_CANARY, ("model_name",), canaries)
        ends = [*self._models.canary_ends.items()]
        yield from _families([_CANARY_ENDS], ("model_name", "outcome"), ends)
        odd = [*self._models.odd_runs.items()]
        yield from _families([_ODD_RUNS], ("model_name", "program"), odd)
        adapted = [
            ((one.name, name), one.bundle.adapters.chosen[name])
            for one in served
            for name in adapters_of(one.bundle)
        ]
        yield from _families([_ADAPTER_REQUESTS], ("model_name", "adapter"), adapted)
        yield builds_metric(served)
        yield from _families([_START], ("model_name",), self._started(served, dict(each)))

    def _started(
        self, served: Sequence[Served], metrics: Mapping[str, EngineMetrics]
    ) -> list[tuple[tuple[str], StartReport]]:
        """Return where the time of the start went, from the first request of a bundle on."""
        for one in served:
            if one.name in self._starts:
                continue
            if any(each.whole_seconds.count for each in metrics[one.name].requests):
                self._starts[one.name] = one.bundle.start_report()
        return [((one.name,), self._starts[one.name]) for one in served if one.name in self._starts]


def _families(
    metrics: Sequence[_Metric[_T]],
    labels: tuple[str, ...],
    each: Sequence[tuple[tuple[str, ...], _T]],
) -> Iterator[Metric]:
    """Yield the family of each metric.

    Args:
        metrics: the metrics.
        labels: the first labels of each.
        each: the values of these labels, and what has the values of each metric.
    """
    for metric in metrics:
        names = (*labels, metric.label) if metric.label else labels
        family = metric.family(metric.name, metric.help, labels=names)
        for before, found in each:
            value = metric.of(found)
            if isinstance(value, HistogramValue):
                bounds = (*map(floatToGoString, value.bounds), "+Inf")
                buckets = list(zip(bounds, itertools.accumulate(value.counts), strict=True))
                family.add_metric(before, buckets, value.sum)
            elif isinstance(value, Mapping):
                for label, one in value.items():
                    family.add_metric((*before, label), one)
            elif value is not None:
                family.add_metric(before, value)
        yield family


@final
class Exposition:
    """The page of all metrics, in the format that a scraper asks for."""

    def __init__(self, models: Models) -> None:
        """Show these bundles and this process."""
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(models))
        ProcessCollector(registry=self._registry)

    def page(self, accept: str) -> tuple[bytes, str]:
        """Return the page and its content type.

        Args:
            accept: the header of that name; empty: there is none.
        """
        if "application/openmetrics-text" in accept:
            # Its other ways of escaping turn the colon of a sample's name into _ (prometheus-client 0.26). No
            # name here needs any.
            page: bytes = openmetrics.generate_latest(  # type: ignore[no-untyped-call]
                self._registry, openmetrics.ALLOWUTF8
            )
            return page, "application/openmetrics-text; version=1.0.0; charset=utf-8"
        return exposition.generate_latest(self._registry), exposition.CONTENT_TYPE_PLAIN_0_0_4
