"""What is exported by OTLP is what the standard variables say, and metrics are the process's own values."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from opentelemetry.proto.metrics.v1 import metrics_pb2
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from libs.common.telemetry import tracing
from libs.common.telemetry.counters import Counters
from libs.common.telemetry.metrics_export import MetricsExport
from libs.common.telemetry.otlp import (
    export_metrics,
    exports_metrics,
    exports_traces,
    metric_exporter,
    protocol_of,
    resource_of,
    span_exporter,
)
from libs.common.telemetry.process_metrics import ProcessMetrics
from slipstream import __version__
from tests.support.network.http_collector import HttpCollector
from tests.support.recorded_spans import kept_spans

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4317"}
Exemplars = dict[str, list[metrics_pb2.Exemplar]]
HTTP = {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}


@pytest.mark.parametrize(
    ("environment", "traces", "metrics"),
    [
        ({}, False, False),
        (ENDPOINT, True, False),
        ({**ENDPOINT, "OTEL_METRICS_EXPORTER": "otlp"}, True, True),
        ({**ENDPOINT, "OTEL_TRACES_EXPORTER": "none"}, False, False),
        ({**ENDPOINT, "OTEL_METRICS_EXPORTER": "otlp", "OTEL_SDK_DISABLED": "true"}, False, False),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:1"}, True, False),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://127.0.0.1:1"}, False, True),
        (
            {"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://127.0.0.1:1", "OTEL_METRICS_EXPORTER": "none"},
            False,
            False,
        ),
    ],
)
def test_the_environment_says_what_is_exported(
    environment: dict[str, str], traces: bool, metrics: bool
) -> None:
    assert (exports_traces(environment), exports_metrics(environment)) == (traces, metrics)


def test_each_signal_may_have_its_own_protocol() -> None:
    assert protocol_of({}, "TRACES") == "grpc"
    assert protocol_of(HTTP, "TRACES") == "http/protobuf"
    assert protocol_of({**HTTP, "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": "grpc"}, "METRICS") == "grpc"
    assert protocol_of({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, "TRACES") == "grpc"


def test_spans_leave_over_http(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    with HttpCollector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
        provider = TracerProvider(resource=resource_of("router", "router-0"), shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(span_exporter(HTTP)))
        provider.get_tracer("test").start_span("one").end()
        (body,) = collector.bodies["/v1/traces"]
    (group,) = trace_service_pb2.ExportTraceServiceRequest.FromString(body).resource_spans
    assert [span.name for scope in group.scope_spans for span in scope.spans] == ["one"]
    assert type(metric_exporter(HTTP)).__module__.startswith("opentelemetry.exporter.otlp.proto.http")


class MetricsCollector(metrics_service_pb2_grpc.MetricsServiceServicer):
    """Keeps the latest metrics that it received over gRPC."""

    def __init__(self) -> None:
        self.resource: dict[str, str] = {}
        self.metrics: dict[str, metrics_pb2.Metric] = {}
        self.requests: list[metrics_service_pb2.ExportMetricsServiceRequest] = []

    def Export(
        self, request: metrics_service_pb2.ExportMetricsServiceRequest, context: Any
    ) -> metrics_service_pb2.ExportMetricsServiceResponse:
        self.requests.append(request)
        (group,) = request.resource_metrics
        self.resource = {pair.key: pair.value.string_value for pair in group.resource.attributes}
        self.metrics = {metric.name: metric for scope in group.scope_metrics for metric in scope.metrics}
        return metrics_service_pb2.ExportMetricsServiceResponse()


@contextmanager
def collecting() -> Iterator[tuple[MetricsCollector, str]]:
    """A collector over gRPC, and its address."""
    collector, server = MetricsCollector(), grpc.server(ThreadPoolExecutor(2))
    add: Any = metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server
    add(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield collector, f"http://127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


async def test_metrics_leave_at_the_interval_and_once_more_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "50")
    counters = Counters()
    metrics = ProcessMetrics("router", counters, lambda _: {"slipstream_requests_running": 2})
    metrics.model = "kimi"
    counters.add("slipstream_requests_finished_total", 3, ("stop",))
    counters.observe("slipstream_time_to_first_token_seconds", 0.3, count=2)
    with collecting() as (collector, endpoint):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", endpoint)
        async with asyncio.timeout(100), export_metrics(metrics, instance="router-0"):
            while not collector.metrics:
                await asyncio.sleep(0.01)
            monkeypatch.setattr(collector, "metrics", {})
            counters.add("slipstream_requests_finished_total", 4, ("stop",))
    found = collector.metrics
    (finished,) = found["slipstream_requests_finished_total"].sum.data_points
    assert (finished.as_int, finished.attributes[0].value.string_value) == (7, "stop")
    assert found["slipstream_requests_finished_total"].sum.is_monotonic
    (refused,) = found["slipstream_http_malformed_total"].sum.data_points
    assert refused.as_int == 0 and "slipstream_prefill_tokens_total" not in found, (
        "those of its own service start at 0"
    )
    (empty,) = found["slipstream_request_duration_seconds"].histogram.data_points
    assert empty.count == 0 and set(empty.bucket_counts) == {0}
    (running,) = found["slipstream_requests_running"].gauge.data_points
    assert running.as_int == 2
    for name in ("slipstream_time_to_first_token_seconds", "gen_ai.server.time_to_first_token"):
        (point,) = found[name].histogram.data_points
        assert (point.count, found[name].unit) == (2, "s")
        assert point.sum == pytest.approx(0.6)
        assert not point.HasField("min")
    assert {pair.key for pair in point.attributes} == {"gen_ai.provider.name", "gen_ai.request.model"}
    assert (collector.resource["service.name"], collector.resource["service.instance.id"]) == (
        "slipstream-router",
        "router-0",
    )
    assert collector.resource["service.version"] == __version__


def exemplars_of(request: metrics_service_pb2.ExportMetricsServiceRequest) -> Exemplars:
    """The exemplars by metric."""
    found: Exemplars = {}
    for group in request.resource_metrics:
        for metric in (metric for scope in group.scope_metrics for metric in scope.metrics):
            for point in metric.histogram.data_points:
                found.setdefault(metric.name, []).extend(point.exemplars)
    return {name: exemplars for name, exemplars in found.items() if exemplars}


async def exported_exemplars(monkeypatch: pytest.MonkeyPatch, protocol: str, counters: Counters) -> Exemplars:
    """What a collector receives of the counters over this protocol."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    metrics = ProcessMetrics("router", counters, lambda _: {})
    if protocol == "grpc":
        with collecting() as (collector, endpoint):
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", endpoint)
            async with export_metrics(metrics, instance="router-0"):
                pass
        return exemplars_of(collector.requests[-1])
    with HttpCollector() as http:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", f"{http.endpoint}/v1/metrics")
        async with export_metrics(metrics, instance="router-0"):
            pass
    return exemplars_of(
        metrics_service_pb2.ExportMetricsServiceRequest.FromString(http.bodies["/v1/metrics"][-1])
    )


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
async def test_exemplars_name_the_exported_spans_of_the_last_values(
    monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    name = "slipstream_time_to_first_token_seconds"
    times = itertools.count(1_700_000_000_000_000_001)
    counters = Counters(clock_ns=lambda: next(times))
    with kept_spans() as kept:
        for value in (0.3, 0.31, 7.0):
            with tracing.server_span(f"request {value}", {}, begins=True):
                counters.observe(name, value, span=tracing.exported_context())
    counters.observe(name, 0.02, span=tracing.exported_context())
    found = await exported_exemplars(monkeypatch, protocol, counters)
    last, slow = kept.one("request 0.31").context, kept.one("request 7.0").context
    assert last is not None and slow is not None
    expected = [
        (0.31, f"{last.trace_id:032x}", f"{last.span_id:016x}", 1_700_000_000_000_000_002),
        (7.0, f"{slow.trace_id:032x}", f"{slow.span_id:016x}", 1_700_000_000_000_000_003),
    ]
    assert set(found) == {name, "gen_ai.server.time_to_first_token"}
    for exemplars in found.values():
        assert [
            (one.as_double, one.trace_id.hex(), one.span_id.hex(), one.time_unix_nano) for one in exemplars
        ] == expected


async def test_a_collector_that_is_unavailable_costs_a_line_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_TIMEOUT", "1")
    metrics = ProcessMetrics("drafter", Counters(), lambda _: {})
    exporter = metric_exporter({})
    await MetricsExport(metrics, exporter, resource_of("drafter", "drafter-0")).send()
    assert "the metrics were not exported" in caplog.text
    exporter.shutdown()
