"""An OTLP collector that keeps the spans it receives, for tests of traces across processes."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.trace.v1 import trace_pb2


@dataclass(frozen=True, slots=True)
class CollectedSpan:
    """One span. Ids are lower-case hex; `parent` is empty at the root; attributes without `slipstream.`."""

    trace: str
    id: str
    parent: str
    name: str
    instance: str
    service: str
    failed: bool
    attributes: Mapping[str, Any]


class OtlpCollector(trace_service_pb2_grpc.TraceServiceServicer):
    """`with OtlpCollector() as collector`: receives spans at `endpoint` until `stop` or the end."""

    def __init__(self) -> None:
        self._spans: list[CollectedSpan] = []
        self._lock = threading.Lock()
        self._server = grpc.server(ThreadPoolExecutor(4))
        add: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
        add(self, self._server)
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> OtlpCollector:
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop listening at the endpoint."""
        self._server.stop(0).wait()

    @property
    def environment(self) -> dict[str, str]:
        """Variables for a process that sends its spans here soon after they end."""
        return {"OTEL_EXPORTER_OTLP_ENDPOINT": self.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "50"}

    @property
    def spans(self) -> list[CollectedSpan]:
        """All spans received so far."""
        with self._lock:
            return list(self._spans)

    def of(self, trace: str) -> list[CollectedSpan]:
        """The spans of one trace."""
        return [span for span in self.spans if span.trace == trace]

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        received = [
            _collected(span, _values(resource.resource.attributes))
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        with self._lock:
            self._spans += received
        return trace_service_pb2.ExportTraceServiceResponse()


def _collected(span: trace_pb2.Span, resource: Mapping[str, Any]) -> CollectedSpan:
    attributes = {name.removeprefix("slipstream."): value for name, value in _values(span.attributes).items()}
    return CollectedSpan(
        trace=span.trace_id.hex(),
        id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        name=span.name,
        instance=resource["service.instance.id"],
        service=resource["service.name"],
        failed=span.status.code == trace_pb2.Status.STATUS_CODE_ERROR,
        attributes=attributes,
    )


def _values(attributes: Any) -> dict[str, Any]:
    def value(of: common_pb2.AnyValue) -> Any:
        kind = of.WhichOneof("value")
        return getattr(of, kind) if kind else None

    return {pair.key: value(pair.value) for pair in attributes}
