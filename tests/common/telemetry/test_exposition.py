"""The metric table is the only source of names; the text of /metrics has exact values and few labels."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.trace import SpanContext, TraceFlags
from prometheus_client import Metric
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from libs.common.telemetry.counters import Counters
from libs.common.telemetry.exposition import render_metrics
from libs.common.telemetry.metric_tables.table import METRICS, SECTIONS, SERVICES, metrics_of

OPEN_METRICS = "application/openmetrics-text; version=1.0.0"
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "00f067aa0ba902b7"
AT_NS = 1_700_000_000_250_000_000


def text(counters: Counters, **options: str) -> str:
    return render_metrics(counters, **options)[0].decode()


def parsed_open_metrics(counters: Counters) -> list[Metric]:
    parse: Any = openmetrics.text_string_to_metric_families
    return list(parse(text(counters, accept=OPEN_METRICS)))


def with_every_metric() -> Counters:
    counters = Counters()
    for metric in METRICS.values():
        labels = tuple(f"any {label}" for label in metric.labels)
        if metric.kind == "histogram":
            counters.observe(metric.name, 1.5, labels)
        else:
            counters.set(metric.name, 1.5, labels)
    return counters


def test_names_are_unique_and_say_their_kind_and_unit() -> None:
    assert len(METRICS) == sum(len(section.metrics) for section in SECTIONS)
    for metric in METRICS.values():
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert not any(part in ("ms", "us", "kb", "mb") for part in metric.name.split("_")), metric.name
        assert {"instance", "job", "role"}.isdisjoint(metric.labels)
        assert list(metric.buckets) == sorted(set(metric.buckets))
        assert bool(metric.buckets) == (metric.kind == "histogram")


def test_the_text_parses_as_prometheus_and_as_openmetrics() -> None:
    counters = with_every_metric()
    assert len(list(text_string_to_metric_families(text(counters)))) == len(METRICS)
    assert len(parsed_open_metrics(counters)) == len(METRICS)


def test_labels_are_escaped() -> None:
    counters = Counters()
    counters.add("slipstream_requests_finished_total", 3, ('a"\\\n',))
    expected = 'slipstream_requests_finished_total{finish_reason="a\\"\\\\\\n"} 3.0\n'
    assert expected in text(counters)


@pytest.mark.parametrize("value", [123_456_789.0, float(2**53 - 1), 1234567.25])
def test_a_value_keeps_all_its_digits(value: float) -> None:
    counters = Counters()
    counters.set("slipstream_prompt_tokens_total", value)
    (family,) = text_string_to_metric_families(text(counters))
    assert [sample.value for sample in family.samples] == [value]


def test_a_histogram_counts_each_value_in_every_bucket_it_fits() -> None:
    counters = Counters()
    for value in (0.0001, 0.00015, 0.0049, 5.0):
        counters.observe("slipstream_refusal_seconds", value)
    lines = text(counters).splitlines()
    name = "slipstream_refusal_seconds"
    ends = {"0.0001": 1.0, "0.0002": 2.0, "0.004": 2.0, "0.005": 3.0, "1.0": 3.0, "+Inf": 4.0}
    for le, count in ends.items():
        assert f'{name}_bucket{{le="{le}"}} {count}' in lines
    assert f"{name}_count 4.0" in lines
    assert f"{name}_sum 5.00515" in lines


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_has_its_counters_and_histograms_at_0_from_the_start(service: str) -> None:
    """The first increase of a series that begins above 0 is lost to `rate` and `increase`."""
    families = {
        family.name: family for family in text_string_to_metric_families(text(Counters(), service=service))
    }
    wanted = {
        metric.name.removesuffix("_total")
        for metric in metrics_of(service)
        if metric.kind != "gauge" and not metric.labels
    }
    assert {name for name in families if name.startswith("slipstream_")} == wanted
    values = {sample.value for name in wanted for sample in families[name].samples}
    assert values == {0.0}
    assert "process_start_time_seconds" in families


def test_exemplars_are_in_openmetrics_only() -> None:
    span = SpanContext(int(TRACE, 16), int(SPAN, 16), is_remote=False, trace_flags=TraceFlags(1))
    counters = Counters(clock_ns=lambda: AT_NS)
    counters.observe("slipstream_time_to_first_token_seconds", 0.3, span=span)
    counters.observe("slipstream_time_to_first_token_seconds", 7.0)
    assert TRACE not in text(counters)
    (family,) = parsed_open_metrics(counters)
    found = {sample.labels["le"]: sample.exemplar for sample in family.samples if sample.exemplar is not None}
    assert {le: (dict(one.labels), one.value, float(str(one.timestamp))) for le, one in found.items()} == {
        "0.5": ({"trace_id": TRACE, "span_id": SPAN}, 0.3, AT_NS / 1e9)
    }
