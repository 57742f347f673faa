"""Records the spans of this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from libs.common.telemetry import tracing

PARENT = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"


class KeptSpans:
    """The spans that have ended."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()

    @property
    def names(self) -> list[str]:
        return [span.name for span in self.exporter.get_finished_spans()]

    def last(self) -> ReadableSpan:
        return self.exporter.get_finished_spans()[-1]

    def one(self, name: str) -> ReadableSpan:
        (found,) = (span for span in self.exporter.get_finished_spans() if span.name == name)
        return found


@contextmanager
def kept_spans() -> Iterator[KeptSpans]:
    """Trace everything inside the block."""
    kept, provider = KeptSpans(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept.exporter))
    tracing.trace_to(provider)
    try:
        yield kept
    finally:
        tracing.trace_to(None)


def parts(span: ReadableSpan) -> tuple[int, int | None]:
    """The ids of a span's trace and parent."""
    assert span.context is not None
    return span.context.trace_id, span.parent.span_id if span.parent is not None else None


def said(span: ReadableSpan) -> dict[str, object]:
    """A span's attributes, without the prefix `slipstream.`"""
    return {name.removeprefix("slipstream."): value for name, value in (span.attributes or {}).items()}
