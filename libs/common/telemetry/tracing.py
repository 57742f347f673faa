"""One request, one trace: the spans of this process, and how their context travels to the next one.

    configure_tracing("decode", "decode-0")         # exports when OTEL_EXPORTER_OTLP_ENDPOINT is set
    with server_span("decode", start.trace): ...    # below the span of the process that sent `trace`
    with span("transfer", source=peer): ...         # below the current one
    request.trace.update(trace_metadata())          # on to the next process

Contexts travel as W3C ones (`traceparent`, `tracestate`), as metadata of a call or as a map in a message
where many requests share a call. Only a front door begins traces: a call without a context, and work for no
particular request, has no span. Without an exporter each function here costs one comparison, so callers ask
`enabled` only before they compute what only a span needs.

Spans are exported by a separate thread from a queue that is bounded and drops what does not fit. A collector
that is unavailable costs no request anything. Attributes are named `slipstream.NAME`, but for those of
OpenTelemetry's conventions (`describe`).
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.trace import INVALID_SPAN, Span, SpanContext, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from libs.common.telemetry.otlp import exports_traces, resource_of, span_exporter
from libs.common.worker_bounds import LAST_SPANS_S
from slipstream.errors import Aborted, SlipstreamError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_MAX_MESSAGE_CHARS = 256
_W3C = TraceContextTextMapPropagator()
_FIELDS = ("traceparent", "tracestate")

Attribute = str | int | float | bool
Attributes = Mapping[str, Attribute]
# What contexts travel in. A function is asked for its carrier only where something is traced.
TraceMetadata = tuple[tuple[str, str], ...]
Carrier = Mapping[str, str] | Callable[[], Mapping[str, str]]

_NO_SPAN = contextlib.nullcontext(INVALID_SPAN)
_tracer: trace.Tracer | None = None


def configure_tracing(role: str, instance: str) -> None:
    """Export spans by OTLP where the environment says so (otlp.py); otherwise trace nothing."""
    if not exports_traces(os.environ):
        return
    # Most processes trace nothing, and their start would wait for this import.
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=resource_of(role, instance), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(span_exporter(os.environ)))
    _end_with_process(provider)
    trace_to(provider)


def trace_to(provider: TracerProvider | None) -> None:
    """Spans of this process go there from now on; None: nowhere."""
    global _tracer
    _tracer = None if provider is None else provider.get_tracer("slipstream")


def enabled() -> bool:
    """Whether spans of this process go anywhere."""
    return _tracer is not None


def trace_metadata() -> TraceMetadata:
    """The context of the current span, to pass as call metadata; empty where there is none."""
    if _tracer is None or not _is_in_trace():
        return ()
    carrier: dict[str, str] = {}
    _W3C.inject(carrier)
    return tuple(carrier.items())


def trace_id() -> str:
    """The id of the current trace in hex; empty where there is none."""
    if _tracer is None:
        return ""
    current = trace.get_current_span().get_span_context()
    return trace.format_trace_id(current.trace_id) if current.is_valid else ""


def exported_context() -> SpanContext | None:
    """The current span's ids where the span is sampled, so that a reader can find it; None elsewhere."""
    if _tracer is None:
        return None
    current = trace.get_current_span().get_span_context()
    return current if current.is_valid and current.trace_flags.sampled else None


def span(name: str, **attributes: Attribute) -> contextlib.AbstractContextManager[Span]:
    """A span below the current one, and the current one inside; none where there is none above it."""
    if _tracer is None:
        return _NO_SPAN
    opened = begin(name, **attributes)
    return _NO_SPAN if opened is INVALID_SPAN else _recorded(opened, current=True)


def begin(name: str, **attributes: Attribute) -> Span:
    """Begin a span like `span`, for what is no block of code: the caller ends it."""
    if _tracer is None or not _is_in_trace():
        return INVALID_SPAN
    return _tracer.start_span(name, attributes=_named(attributes))


def server_span(
    name: str,
    carrier: Carrier,
    attributes: Attributes | None = None,
    *,
    current: bool = True,
    begins: bool = False,
) -> contextlib.AbstractContextManager[Span]:
    """A span below that of the process which sent `carrier`. Without a valid context there it begins a trace
    where `begins`, else there is none. `current=False` for generators: they may be resumed in another
    context."""
    if _tracer is None:
        return _NO_SPAN
    opened = begin_server(name, carrier, attributes, begins=begins)
    return _NO_SPAN if opened is INVALID_SPAN else _recorded(opened, current=current)


def begin_server(
    name: str, carrier: Carrier, attributes: Attributes | None = None, *, begins: bool = False
) -> Span:
    """Begin a span like `server_span`, for what is no block of code: the caller ends it."""
    if _tracer is None:
        return INVALID_SPAN
    sent = carrier() if callable(carrier) else carrier
    given = {field: str(sent[field]) for field in _FIELDS if field in sent}
    parent = _W3C.extract(given, context=contexts.Context())
    if not begins and not trace.get_current_span(parent).get_span_context().is_valid:
        return INVALID_SPAN
    described = {**_rpc_attributes(name), **_named(attributes or {})}
    return _tracer.start_span(name, context=parent, kind=SpanKind.SERVER, attributes=described)


def under(parent: Span) -> contextlib.AbstractContextManager[object]:
    """Make a span of `begin` the current one for a block that does not yield."""
    if parent is INVALID_SPAN:
        return _NO_SPAN
    return trace.use_span(parent, record_exception=False, set_status_on_exception=False)


def annotate(opened: Span | None = None, /, **attributes: Attribute) -> None:
    """Attributes of the span, or of the current one. Nothing for one that has ended."""
    if _tracer is None:
        return
    opened = opened if opened is not None else trace.get_current_span()
    if opened.is_recording():
        opened.set_attributes(_named(attributes))


def describe(attributes: Mapping[str, Attribute | Sequence[str]], opened: Span | None = None) -> None:
    """Attributes under the names of OpenTelemetry's conventions, as they stand; else as `annotate`."""
    if _tracer is None:
        return
    opened = opened if opened is not None else trace.get_current_span()
    if opened.is_recording():
        opened.set_attributes(dict(attributes))


def failed(error: BaseException, opened: Span | None = None) -> None:
    """End the span, or the current one, with this error; the first error counts. What its caller ended is
    no error, and what a server refuses as the caller's fault is none of the server's."""
    if _tracer is None:
        return
    opened = opened if opened is not None else trace.get_current_span()
    if not opened.is_recording():
        return
    from opentelemetry.sdk.trace import ReadableSpan  # a span that records is one: the package is loaded

    if isinstance(error, (Aborted, asyncio.CancelledError)):
        annotate(opened, cancelled=True)
        return
    if isinstance(opened, ReadableSpan) and opened.status.status_code is StatusCode.ERROR:
        return
    opened.set_attribute("error.type", type(error).__name__)
    message = str(error)
    if isinstance(error, SlipstreamError):
        annotate(opened, code=error.code)
        message = error.message
        if error.http_status < 500 and isinstance(opened, ReadableSpan) and opened.kind is SpanKind.SERVER:
            return
    opened.set_status(Status(StatusCode.ERROR, message[:_MAX_MESSAGE_CHARS]))


@contextlib.contextmanager
def _recorded(opened: Span, *, current: bool) -> Iterator[Span]:
    token = contexts.attach(trace.set_span_in_context(opened)) if current else None
    try:
        yield opened
    except (Exception, asyncio.CancelledError) as error:
        failed(error, opened)
        raise
    finally:
        if token is not None:
            contexts.detach(token)
        opened.end()


def _is_in_trace() -> bool:
    return trace.get_current_span().get_span_context().is_valid


def _named(attributes: Attributes) -> dict[str, Attribute]:
    return {f"slipstream.{name}": value for name, value in attributes.items()}


def _rpc_attributes(name: str) -> dict[str, Attribute]:
    """OpenTelemetry's attributes of a gRPC method given as package.Service/Method; none of other names."""
    service, _, method = name.rpartition("/")
    if "." not in service or " " in service:
        return {}
    return {"rpc.system": "grpc", "rpc.service": service, "rpc.method": method}


def _end_with_process(provider: TracerProvider) -> None:
    """Export what is left at the end, within LAST_SPANS_S.

    The SDK's own end waits half a minute for a collector that is unavailable. The thread is there before, as
    none can be started then.
    """
    ending = threading.Event()

    def end() -> None:
        ending.wait()
        provider.shutdown()

    thread = threading.Thread(target=end, name="last-spans", daemon=True)
    thread.start()

    def leave() -> None:
        ending.set()
        thread.join(LAST_SPANS_S)

    atexit.register(leave)
