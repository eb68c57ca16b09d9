"""OpenTelemetry (extra `prejit[otel]`): decides by the `OTEL_*` variables whether and where to send it.

No package of opentelemetry is imported unless one of these variables asks for it. The SDK itself reads most
of them: OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES, OTEL_TRACES_SAMPLER, OTEL_EXPORTER_OTLP_HEADERS, ...
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from prejit.runtime.errors import UsageError

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace.export import SpanExporter

    from prejit.server.telemetry.spans import Telemetry

_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
_PROTOCOL = "http/protobuf"
_EXPORTERS = ("otlp", "console", "none")


def start() -> Telemetry | None:
    """Return what records spans and metrics, or None if no variable asks for it.

    Raises:
        UsageError: a variable has a value that prejit does not support, or a package is missing.
    """
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    traces, metrics = _exporter("TRACES"), _exporter("METRICS")
    if (traces, metrics) == ("none", "none"):
        return None
    try:
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        from prejit.server.telemetry.spans import Telemetry

        resource = _resource()
        tracers = TracerProvider(resource=resource)
        if traces != "none":
            tracers.add_span_processor(BatchSpanProcessor(_span_exporter(traces)))
        readers = []
        if metrics != "none":
            readers.append(PeriodicExportingMetricReader(_metric_exporter(metrics)))
        return Telemetry(tracers, MeterProvider(readers, resource=resource))
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("opentelemetry"):
            raise
        raise UsageError(
            f"OTEL_* variables ask for OpenTelemetry, which needs {error.name}: it is not installed",
            hint="pip install 'prejit[otel]', or set OTEL_SDK_DISABLED=true",
        ) from error


def _exporter(signal: str) -> str:
    """Return where a signal goes: `otlp`, `console` or `none`."""
    endpoints = (_ENDPOINT, f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT")
    has_endpoint = any(os.environ.get(name) for name in endpoints)
    name = f"OTEL_{signal}_EXPORTER"
    # Without any of them the specification sends to localhost. A server must be asked for that.
    exporter = os.environ.get(name) or ("otlp" if has_endpoint else "none")
    if exporter not in _EXPORTERS:
        raise UsageError(f"{name}: expected one of {', '.join(_EXPORTERS)}, found {exporter!r:.80}")
    if exporter == "otlp":
        for name in (f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
            if protocol := os.environ.get(name):
                if protocol != _PROTOCOL:
                    raise UsageError(
                        f"{name}: expected {_PROTOCOL}, found {protocol!r:.80}",
                        hint="collectors take it on port 4318",
                    )
                break
    return exporter


def _resource() -> Resource:
    from importlib import metadata

    from opentelemetry.sdk.resources import Resource

    found = Resource.create({"service.version": metadata.version("prejit")})
    if str(found.attributes["service.name"]).startswith("unknown_service"):
        found = found.merge(Resource({"service.name": "prejit"}))
    return found


def _span_exporter(exporter: str) -> SpanExporter:
    if exporter == "console":
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        return ConsoleSpanExporter()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter()


def _metric_exporter(exporter: str) -> MetricExporter:
    if exporter == "console":
        from opentelemetry.sdk.metrics.export import ConsoleMetricExporter

        return ConsoleMetricExporter()
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

    return OTLPMetricExporter()
