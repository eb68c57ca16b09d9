"""Metrics for Prometheus: what the engines of all served bundles measure, under names that others query.

The names that begin with `vllm:` are vLLM's, with its labels and units: its dashboards and the Gateway API
Inference Extension query them (vllm/v1/metrics/loggers.py). The others begin with `prejit:`. See
docs/operations.md for those that somebody should watch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, NamedTuple, final, get_args

from prometheus_client import CollectorRegistry, ProcessCollector, exposition
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from prejit.runtime.engine.metrics import (
    EngineMetrics,
    HistogramValue,
    MicroMetrics,
    host_memory_bytes,
    host_memory_limit_bytes,
)
from prejit.runtime.fallback import fallback_counts
from prejit.runtime.server.served import State

if TYPE_CHECKING:
    from prejit.runtime.server.served import Models, Served
    from prejit.runtime.start.report import StartReport


class _Value(NamedTuple):
    """A metric with one value for each bundle; the value None is left out."""

    name: str
    help: str
    of: Callable[[EngineMetrics], float | None]


class _Labelled(NamedTuple):
    """A metric with a value for each bundle and each value of one more label."""

    name: str
    help: str
    label: str
    of: Callable[[EngineMetrics], Mapping[str, float]]


class _Distribution(NamedTuple):
    """A histogram for each bundle."""

    name: str
    help: str
    of: Callable[[EngineMetrics], HistogramValue]


SOURCES = ("loaded", "compiled", "kept", "compiling", "unused")
"""The ways in which a program becomes ready."""

_VLLM_REASONS = {
    "stop": ("stop", "mask"),
    "length": ("length", "context"),
    "abort": ("cancelled", "deadline"),
    "error": ("error", "nan"),
}
"""vLLM's reasons and ours. vLLM does not count requests that it refuses."""


def _vllm_finished(metrics: EngineMetrics) -> dict[str, float]:
    return {
        theirs: sum(metrics.finished.get(reason, 0) for reason in ours)
        for theirs, ours in _VLLM_REASONS.items()
    }


def _micro(of: Callable[[MicroMetrics], int]) -> Callable[[EngineMetrics], dict[str, float]]:
    return lambda metrics: {one.name: of(one) for one in metrics.micro}


_VLLM_GAUGES = (
    _Value("vllm:num_requests_running", "Requests that have a slot.", lambda m: m.running),
    _Value("vllm:num_requests_waiting", "Requests in the queue.", lambda m: m.waiting),
    _Value(
        "vllm:kv_cache_usage_perc",
        "Share of the KV cache's positions that live requests use, 0 to 1.",
        lambda m: m.kv_cache_usage,
    ),
    _Value(
        "vllm:gpu_cache_usage_perc",
        "The same, by the name that dashboards and gateways of 2025 query.",
        lambda m: m.kv_cache_usage,
    ),
)
_VLLM_COUNTERS = (
    _Value(
        "vllm:prompt_tokens",
        "Tokens of all prompts that were read, cached ones included.",
        lambda m: m.prompt_tokens,
    ),
    _Value("vllm:generation_tokens", "New tokens.", lambda m: m.generation_tokens),
    _Value(
        "vllm:prefix_cache_queries",
        "Tokens of prompts that were looked up in the caches.",
        lambda m: m.prompt_tokens,
    ),
    _Value(
        "vllm:prefix_cache_hits",
        "Tokens of prompts that were in a cache already.",
        lambda m: m.cached_prompt_tokens,
    ),
)
_VLLM_LABELLED = (
    _Labelled(
        "vllm:request_success",
        "Requests that ended, by vLLM's reasons.",
        "finished_reason",
        _vllm_finished,
    ),
)
_VLLM_HISTOGRAMS = (
    _Distribution(
        "vllm:time_to_first_token_seconds",
        "Time from a request to its first token.",
        lambda m: m.first_token_seconds,
    ),
    _Distribution(
        "vllm:inter_token_latency_seconds",
        "Time from one token of a request to the next.",
        lambda m: m.inter_token_seconds,
    ),
    _Distribution(
        "vllm:time_per_output_token_seconds",
        "The same, by the name that dashboards of 2025 query.",
        lambda m: m.inter_token_seconds,
    ),
    _Distribution(
        "vllm:e2e_request_latency_seconds",
        "Time from a request to its last token.",
        lambda m: m.e2e_seconds,
    ),
    _Distribution(
        "vllm:request_queue_time_seconds",
        "Time from a request until it has a slot.",
        lambda m: m.queue_seconds,
    ),
    _Distribution(
        "vllm:request_prefill_time_seconds",
        "Time in which a prompt is computed.",
        lambda m: m.prefill_seconds,
    ),
    _Distribution(
        "vllm:request_decode_time_seconds",
        "Time of the decode calls of a request.",
        lambda m: m.decode_seconds,
    ),
    _Distribution("vllm:request_prompt_tokens", "Tokens of a prompt.", lambda m: m.prompt_length),
    _Distribution(
        "vllm:request_generation_tokens", "New tokens of a request.", lambda m: m.new_tokens
    ),
)
_GAUGES = (
    _Value("prejit:slots", "Requests that can run at a time.", lambda m: m.slots),
    _Value("prejit:queue_size", "Requests that can wait at a time.", lambda m: m.queue_size),
    _Value("prejit:kv_cache_bytes", "Memory of the KV caches.", lambda m: m.cache_bytes),
    _Value(
        "prejit:kv_cache_budget_bytes",
        "The most memory that KV caches may use; absent without a limit.",
        lambda m: m.cache_budget_bytes,
    ),
    _Value("prejit:prefix_cache_bytes", "Memory of cached prefixes.", lambda m: m.prefix_bytes),
    _Value(
        "prejit:prefix_cache_budget_bytes",
        "The most memory that cached prefixes may use.",
        lambda m: m.prefix_budget_bytes,
    ),
    _Value(
        "prejit:device_memory_bytes",
        "Peak memory in use on the bundle's accelerator; absent on a CPU.",
        lambda m: m.device_memory_bytes,
    ),
)
_COUNTERS = (
    _Value(
        "prejit:compile_seconds",
        "Time that compiling took; 0 if every program was loaded.",
        lambda m: m.compile_seconds,
    ),
    _Value(
        "prejit:requests_waited_for_compile",
        "Requests that ended and waited for the compilation of a program.",
        lambda m: m.waited_for_compile,
    ),
    _Value(
        "prejit:nan_requests",
        "Requests that ended because the logits are not numbers.",
        lambda m: m.nan,
    ),
    _Value(
        "prejit:device_busy_seconds",
        "Time in which a program of the engine ran.",
        lambda m: m.busy_seconds,
    ),
    _Value("prejit:steps", "Steps of the batch.", lambda m: m.steps),
    _Value(
        "prejit:batch_rows",
        "Requests that got tokens, summed over the steps.",
        lambda m: m.batch_rows,
    ),
    _Value(
        "prejit:batch_slots",
        "Rows of the bucket, summed over the steps that gave tokens.",
        lambda m: m.batch_slots,
    ),
    _Value(
        "prejit:computed_positions",
        "Positions that were computed for requests that ended, padding included.",
        lambda m: m.computed_positions,
    ),
    _Value(
        "prejit:useful_positions",
        "Computed positions that belonged to a request.",
        lambda m: m.useful_positions,
    ),
)
_PROGRAMS = _Labelled(
    "prejit:programs",
    "Programs by how they became ready: loaded, compiled, kept, compiling, unused.",
    "source",
    lambda m: {source: m.programs.get(source, 0) for source in SOURCES},
)
_LABELLED = (
    _Labelled(
        "prejit:requests",
        "Requests that ended, by the reason.",
        "reason",
        lambda m: dict(m.finished),
    ),
    _Labelled(
        "prejit:microbatch_calls",
        "Calls of an encoder or a function that have a result.",
        "program",
        _micro(lambda one: one.calls),
    ),
    _Labelled(
        "prejit:microbatch_batches",
        "Runs of the program for these calls: fewer where callers shared one.",
        "program",
        _micro(lambda one: one.batches),
    ),
    _Labelled(
        "prejit:microbatch_rows",
        "Rows of callers in these runs.",
        "program",
        _micro(lambda one: one.rows),
    ),
    _Labelled(
        "prejit:microbatch_padded_rows",
        "Rows of these runs that only filled the bucket.",
        "program",
        _micro(lambda one: one.padded_rows),
    ),
)

_LABELS = ("model_name",)
_VLLM_LABELS = ("model_name", "engine")


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
        yield from _values(GaugeMetricFamily, _VLLM_GAUGES, _VLLM_LABELS, vllm)
        yield from _values(CounterMetricFamily, _VLLM_COUNTERS, _VLLM_LABELS, vllm)
        yield from _labelled(CounterMetricFamily, _VLLM_LABELLED, _VLLM_LABELS, vllm)
        for distribution in _VLLM_HISTOGRAMS:
            yield _histogram(distribution, vllm)
        yield from _values(GaugeMetricFamily, _GAUGES, _LABELS, ours)
        yield from _values(CounterMetricFamily, _COUNTERS, _LABELS, ours)
        yield from _labelled(GaugeMetricFamily, (_PROGRAMS,), _LABELS, ours)
        yield from _labelled(CounterMetricFamily, _LABELLED, _LABELS, ours)
        yield from self._process()
        yield from self._bundles(served)
        yield self._start(served, dict(each))

    def _process(self) -> Iterator[Metric]:
        """Yield what the bundles of a server share."""
        yield GaugeMetricFamily(
            "prejit:host_memory_bytes", "Resident memory of this process.", host_memory_bytes()
        )
        yield GaugeMetricFamily(
            "prejit:host_memory_limit_bytes",
            "Memory that this process may use: its container's limit, or the machine's memory.",
            host_memory_limit_bytes(),
        )
        states = GaugeMetricFamily(
            "prejit:server_state", "1 for the state of the server.", labels=("state",)
        )
        for state in get_args(State):
            states.add_metric((state,), state == self._models.state)
        yield states
        fallbacks = CounterMetricFamily(
            "prejit:fallbacks",
            "Fallbacks to compiling here, by the axis that did not match.",
            labels=("axis",),
        )
        for axis, count in fallback_counts().items():
            fallbacks.add_metric((axis,), count)
        yield fallbacks

    def _bundles(self, served: Sequence[Served]) -> Iterator[Metric]:
        """Yield which bundles these are, and how they were loaded."""
        build = InfoMetricFamily(
            "prejit:build",
            "What runs: model_name, bundle, digest, target, and versions of prejit, jax, jaxlib and cuda.",
        )
        matched = GaugeMetricFamily(
            "prejit:target_matched",
            "1 if this machine matches the target of the bundle, 0 if programs are compiled here.",
            labels=_LABELS,
        )
        for one in served:
            build.add_metric((), _build(one))
            matched.add_metric((one.name,), one.bundle.matched)
        yield build
        yield matched

    def _start(self, served: Sequence[Served], metrics: Mapping[str, EngineMetrics]) -> Metric:
        """Return where the time of the start went, from the first request of a bundle on."""
        family = GaugeMetricFamily(
            "prejit:start_seconds",
            "Time from the start of the process to the first result, by part, without idle time.",
            labels=("model_name", "part"),
        )
        for one in served:
            if one.name not in self._starts:
                if not _has_answered(metrics[one.name]):
                    continue
                self._starts[one.name] = one.bundle.start_report()
            start = self._starts[one.name]
            for part in ("process", "imports", "reading", "verifying", "loading", "first_run"):
                family.add_metric((one.name, part), getattr(start, f"{part}_seconds"))
        return family


_Each = Sequence[tuple[tuple[str, ...], EngineMetrics]]
"""The values of the first labels, and the metrics, of each bundle."""
_Family = type[GaugeMetricFamily] | type[CounterMetricFamily]


def _values(
    kind: _Family, metrics: Sequence[_Value], labels: tuple[str, ...], each: _Each
) -> Iterator[Metric]:
    for metric in metrics:
        family = kind(metric.name, metric.help, labels=labels)
        for names, found in each:
            if (value := metric.of(found)) is not None:
                family.add_metric(names, value)
        yield family


def _labelled(
    kind: _Family, metrics: Sequence[_Labelled], labels: tuple[str, ...], each: _Each
) -> Iterator[Metric]:
    for metric in metrics:
        family = kind(metric.name, metric.help, labels=(*labels, metric.label))
        for names, found in each:
            for label, value in metric.of(found).items():
                family.add_metric((*names, label), value)
        yield family


def _histogram(distribution: _Distribution, each: _Each) -> Metric:
    family = HistogramMetricFamily(distribution.name, distribution.help, labels=_VLLM_LABELS)
    for names, metrics in each:
        value = distribution.of(metrics)
        bounds = (*map(floatToGoString, value.bounds), "+Inf")
        buckets = list(zip(bounds, itertools.accumulate(value.counts), strict=True))
        family.add_metric(names, buckets, value.sum)
    return family


def _build(served: Served) -> dict[str, str]:
    """Return the labels of the info metric of one bundle."""
    bundle = served.bundle
    found = {
        axis.name: axis.found
        for verdict in bundle.verdicts
        if verdict.target == bundle.target
        for axis in verdict.axes
    }
    return {
        "model_name": served.name,
        "bundle": bundle.name,
        "digest": bundle.digest,
        "target": bundle.target,
        "prejit": metadata.version("prejit"),
        "jax": metadata.version("jax"),
        "jaxlib": metadata.version("jaxlib"),
        "cuda": found.get("cuda", ""),
    }


def _has_answered(metrics: EngineMetrics) -> bool:
    """Return whether an engine has given a result of any kind."""
    return metrics.e2e_seconds.count > 0 or any(one.calls for one in metrics.micro)


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
