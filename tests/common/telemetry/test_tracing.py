"""Where traces begin, what joins them, and what their spans say of an end."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opentelemetry.trace import INVALID_SPAN, StatusCode

from libs.common.telemetry import tracing
from slipstream import errors
from tests.support.recorded_spans import PARENT, KeptSpans, kept_spans, parts


@pytest.fixture
def kept() -> Iterator[KeptSpans]:
    with kept_spans() as kept:
        yield kept


def test_a_span_of_another_process_is_the_parent_and_goes_on(kept: KeptSpans) -> None:
    with tracing.server_span("outer", {"traceparent": PARENT, "tracestate": "vendor=1"}):
        carried = dict(tracing.trace_metadata())
    with tracing.server_span("inner", carried), tracing.span("inmost", blocks=3):
        pass
    outer, inmost, inner = kept.exporter.get_finished_spans()
    assert parts(outer) == (int("a" * 32, 16), int("b" * 16, 16))
    assert outer.context is not None
    assert inner.context is not None
    assert parts(inner) == (int("a" * 32, 16), outer.context.span_id)
    assert parts(inmost) == (int("a" * 32, 16), inner.context.span_id)
    assert carried["tracestate"] == "vendor=1"
    assert dict(inmost.attributes or {}) == {"slipstream.blocks": 3}


def test_where_nothing_is_traced_no_carrier_is_asked_and_every_span_is_the_same_nothing() -> None:
    def carrier() -> dict[str, str]:
        raise AssertionError("the span is not recorded")

    served = tracing.server_span("call", carrier, begins=True)
    assert served is tracing.span("below", tokens=1) is tracing.span("another")
    with served as outer, served as inner:
        assert outer is inner is tracing.begin_server("call", carrier) is INVALID_SPAN
    assert tracing.trace_metadata() == ()


def test_a_span_that_its_caller_ends_is_below_its_carrier(kept: KeptSpans) -> None:
    assert tracing.begin_server("of nobody", dict) is INVALID_SPAN
    opened = tracing.begin_server("drafts", lambda: {"traceparent": PARENT}, {"rows": 2})
    assert tracing.trace_metadata() == ()  # the span is not current
    opened.end()
    assert parts(kept.last()) == (int("a" * 32, 16), int("b" * 16, 16))


def test_a_span_of_a_grpc_method_has_the_conventions_attributes(kept: KeptSpans) -> None:
    method = "slipstream.v1.RouterService/Generate"
    for name in (method, "POST /v1/chat.completions/x", "prefill"):
        with tracing.server_span(name, {}, begins=True):
            pass
        described = {
            key: value for key, value in (kept.last().attributes or {}).items() if key.startswith("rpc.")
        }
        assert described == (
            {"rpc.system": "grpc", "rpc.service": "slipstream.v1.RouterService", "rpc.method": "Generate"}
            if name == method
            else {}
        )


def test_only_a_front_door_begins_a_trace(kept: KeptSpans) -> None:
    with tracing.span("below nothing") as opened, tracing.server_span("of nobody", {}) as served:
        assert opened is served is tracing.begin("below nothing") is INVALID_SPAN
        assert tracing.trace_metadata() == ()
    assert kept.names == []
    with tracing.server_span("door", {}, begins=True):
        assert dict(tracing.trace_metadata()).keys() == {"traceparent"}
    assert parts(kept.last())[1] is None


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    version=st.sampled_from(["00", "01", "ff", "0", ""]) | st.text(max_size=3),
    trace=st.text("0af", min_size=31, max_size=33) | st.text(max_size=40),
    parent=st.text("0af", min_size=15, max_size=17) | st.text(max_size=20),
    flags=st.sampled_from(["01", "1", ""]) | st.text(max_size=3),
    state=st.text(max_size=60) | st.just(","),
)
def test_a_context_is_valid_or_ignored(
    kept: KeptSpans, version: str, trace: str, parent: str, flags: str, state: str
) -> None:
    """W3C Trace Context, 3.2: what cannot be parsed begins a new trace, and never fails a request."""
    carrier = {"traceparent": f"{version}-{trace}-{parent}-{flags}", "tracestate": state}
    with tracing.server_span("door", carrier, begins=True) as opened:
        context = opened.get_span_context()
    assert context.is_valid
    if f"{context.trace_id:032x}" != trace:
        with tracing.server_span("behind it", carrier) as behind:
            assert behind is INVALID_SPAN


@pytest.mark.parametrize(
    ("error", "attributes"),
    [
        (errors.Unavailable("gone"), {"error.type": "Unavailable", "slipstream.code": "UNAVAILABLE"}),
        (ValueError("x" * 999), {"error.type": "ValueError"}),
    ],
)
def test_an_error_is_on_the_span_that_it_ended(
    kept: KeptSpans, error: Exception, attributes: dict[str, str]
) -> None:
    with pytest.raises(type(error)), tracing.server_span("call", {"traceparent": PARENT}, {"tokens": 2}):
        raise error
    span = kept.last()
    assert span.status.status_code is StatusCode.ERROR
    assert span.status.description == str(error)[:256]
    assert dict(span.attributes or {}) == {"slipstream.tokens": 2, **attributes}


def test_a_refusal_is_no_error_of_the_server_that_made_it(kept: KeptSpans) -> None:
    refusal = errors.InvalidArgument("top_p", "must be a number")

    def refuse() -> None:
        with tracing.server_span("call", {"traceparent": PARENT}), tracing.span("below"):
            raise refusal

    with pytest.raises(errors.InvalidArgument):
        refuse()
    served = kept.one("call")
    assert served.status.status_code is StatusCode.UNSET
    said = {"error.type": "InvalidArgument", "slipstream.code": "INVALID_ARGUMENT"}
    assert dict(served.attributes or {}) == said
    assert kept.one("below").status.status_code is StatusCode.ERROR


def test_the_first_error_counts(kept: KeptSpans) -> None:
    def fail() -> None:
        tracing.failed(errors.Unavailable("first"))
        raise ValueError("second")

    with pytest.raises(ValueError, match="second"), tracing.server_span("call", {"traceparent": PARENT}):
        fail()
    assert kept.last().status.description == "first"


@pytest.mark.parametrize("error", [errors.Aborted("by its caller"), asyncio.CancelledError()])
def test_what_its_caller_ended_is_no_error(kept: KeptSpans, error: BaseException) -> None:
    with pytest.raises(type(error)), tracing.server_span("call", {"traceparent": PARENT}):
        raise error
    assert kept.last().status.status_code is StatusCode.UNSET
    assert dict(kept.last().attributes or {}) == {"slipstream.cancelled": True}


async def test_a_span_is_current_in_tasks_begun_under_it(kept: KeptSpans) -> None:
    with tracing.server_span("call", {"traceparent": PARENT}):
        attempt = tracing.begin("attempt")

        async def work() -> None:
            with tracing.span("work"):
                await asyncio.sleep(0)

        with tracing.under(attempt):
            task = asyncio.create_task(work())
        assert dict(tracing.trace_metadata())["traceparent"][36:52] != f"{_id(attempt):016x}"
        await task
        attempt.end()
    work_span = kept.exporter.get_finished_spans()[0]
    assert (work_span.name, parts(work_span)[1]) == ("work", _id(attempt))
    tracing.annotate(attempt, late=True)  # of no effect, and no complaint
    tracing.failed(ValueError("late"), attempt)
    assert kept.names == ["work", "attempt", "call"]


def test_without_an_exporter_there_is_nothing() -> None:
    assert not tracing.enabled()
    with tracing.server_span("door", {"traceparent": PARENT}, begins=True) as opened, tracing.span("in"):
        assert opened is INVALID_SPAN
        assert tracing.trace_metadata() == ()
    tracing.failed(ValueError(secrets.token_hex(4)))


def _id(span: object) -> int:
    context = span.get_span_context()  # type: ignore[attr-defined]
    return int(context.span_id)


def test_only_a_sampled_span_is_named_beside_a_value(kept: KeptSpans) -> None:
    assert tracing.exported_context() is None
    with tracing.server_span("request", {"traceparent": PARENT}):
        found = tracing.exported_context()
    assert found is not None and found == kept.last().context
    with tracing.server_span("request", {"traceparent": PARENT.removesuffix("01") + "00"}):
        assert tracing.trace_id() == "a" * 32
        assert tracing.exported_context() is None, "the span is not exported"
