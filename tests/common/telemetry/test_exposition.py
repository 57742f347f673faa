"""The metric table is the only source of names; rendering escapes labels."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from libs.common.telemetry.counters import Counters
from libs.common.telemetry.exposition import render_prometheus
from libs.common.telemetry.metric_table import METRICS


def test_names_are_unique_and_say_their_kind() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert metric.name.endswith("_total") == (metric.kind == "counter")


def test_a_name_outside_the_table_is_refused() -> None:
    with pytest.raises(KeyError, match="slipstream_made_up"):
        Counters().add("slipstream_made_up")


def test_prometheus_text_has_help_type_and_escaped_labels() -> None:
    counters = Counters()
    counters.add("slipstream_requests_total", 2)
    counters.add("slipstream_requests_total")
    text = render_prometheus([({"instance": 'a"\\\n'}, counters.snapshot())])
    assert (
        '# TYPE slipstream_requests_total counter\nslipstream_requests_total{instance="a\\"\\\\\\n"} 3.0\n'
        in text
    )


def test_the_text_parses_as_prometheus() -> None:
    counters = Counters()
    for metric in METRICS:
        if metric.kind == "histogram":
            counters.observe(metric.name, 1.5)
        else:
            counters.set(metric.name, 1.5)
    families = list(
        text_string_to_metric_families(render_prometheus([({"instance": "x"}, counters.snapshot())]))
    )
    assert len(families) == len(METRICS)


@pytest.mark.parametrize("value", [123_456_789.0, float(2**53 - 1), 1234567.25])
def test_a_value_keeps_all_its_digits(value: float) -> None:
    text = render_prometheus([({"instance": "x"}, {"slipstream_prompt_tokens_total": value})])
    (family,) = text_string_to_metric_families(text)
    assert [sample.value for sample in family.samples] == [value]


def test_a_histogram_counts_each_value_in_every_bucket_it_fits() -> None:
    counters = Counters()
    for value in (0.1, 0.15, 4.9, 5000.0):
        counters.observe("slipstream_refusal_ms", value)
    lines = render_prometheus([({"instance": "x"}, counters.snapshot())]).splitlines()
    name = "slipstream_refusal_ms"
    for le, count in (("0.1", 1.0), ("0.2", 2.0), ("4.0", 2.0), ("5.0", 3.0), ("1000.0", 3.0), ("+Inf", 4.0)):
        assert f'{name}_bucket{{instance="x",le="{le}"}} {count}' in lines
    assert f'{name}_count{{instance="x"}} 4.0' in lines
    assert f'{name}_sum{{instance="x"}} 5005.15' in lines
    with pytest.raises(KeyError):
        counters.observe("slipstream_requests_total", 1.0)
