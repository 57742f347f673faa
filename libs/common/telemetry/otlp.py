"""Which telemetry leaves by OTLP, and how: by the standard environment variables of OpenTelemetry.

OTEL_EXPORTER_OTLP_ENDPOINT turns traces on. OTEL_METRICS_EXPORTER=otlp, or a metrics endpoint, turns
metrics on. OTEL_EXPORTER_OTLP_PROTOCOL is grpc (the default) or http/protobuf. The exporters read the rest.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any

from slipstream import __version__
from slipstream.rpc.dial import NO_RETRIES

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace.export import SpanExporter

    from libs.common.telemetry.process_metrics import ProcessMetrics

log = logging.getLogger(__name__)

GRPC, HTTP = "grpc", "http/protobuf"


def resource_of(service: str, instance: str) -> Resource:
    """The resource of a process's spans and metrics."""
    from opentelemetry.sdk.resources import Resource

    return Resource.create(
        {
            "service.name": f"slipstream-{service}",
            "service.instance.id": instance,
            "service.version": __version__,
        }
    )


def exports_traces(environment: Mapping[str, str]) -> bool:
    """Whether spans are exported."""
    names = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    return _is_on(environment, "TRACES") and any(environment.get(name) for name in names)


def exports_metrics(environment: Mapping[str, str]) -> bool:
    """Whether metrics are exported. A general endpoint alone is for traces: some collectors take no more."""
    is_asked_for = environment.get("OTEL_METRICS_EXPORTER") == "otlp"
    endpoint = environment.get("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT")
    return _is_on(environment, "METRICS") and (is_asked_for or bool(endpoint))


def protocol_of(environment: Mapping[str, str], signal: str) -> str:
    """The protocol of TRACES or METRICS; an unknown one counts as gRPC."""
    chosen = environment.get(f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL") or environment.get(
        "OTEL_EXPORTER_OTLP_PROTOCOL", GRPC
    )
    if chosen not in (GRPC, HTTP):
        log.warning("OTEL_EXPORTER_OTLP_PROTOCOL: %s is not supported; %s is used", chosen, GRPC)
        return GRPC
    return chosen


def span_exporter(environment: Mapping[str, str]) -> SpanExporter:
    """The exporter of spans. Its packages are imported here: most processes trace nothing."""
    if protocol_of(environment, "TRACES") == HTTP:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

        return HttpExporter()
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(channel_options=_CHANNEL_OPTIONS)


def metric_exporter(environment: Mapping[str, str]) -> MetricExporter:
    """The exporter of metrics."""
    if protocol_of(environment, "METRICS") == HTTP:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter as HttpExporter

        return HttpExporter()
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter

    return OTLPMetricExporter(channel_options=_CHANNEL_OPTIONS)


@contextlib.asynccontextmanager
async def export_metrics(metrics: ProcessMetrics, *, instance: str) -> AsyncIterator[None]:
    """Export metrics meanwhile, and once more at the end, where the environment says so."""
    if not exports_metrics(os.environ):
        yield
        return
    # Most processes export nothing, and their start would wait for this import.
    from libs.common.telemetry.metrics_export import MetricsExport

    export = MetricsExport(metrics, metric_exporter(os.environ), resource_of(metrics.service, instance))
    async with export.running(os.environ):
        yield


_CHANNEL_OPTIONS: Any = (NO_RETRIES,)


def _is_on(environment: Mapping[str, str], signal: str) -> bool:
    is_disabled = environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
    return not is_disabled and environment.get(f"OTEL_{signal}_EXPORTER", "otlp") == "otlp"
