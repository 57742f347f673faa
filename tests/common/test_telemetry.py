"""The metric table is the only source of names; rendering escapes labels."""

from __future__ import annotations

import pytest

from libs.common.telemetry import METRICS, Counters, render_prometheus


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
        '# TYPE slipstream_requests_total counter\nslipstream_requests_total{instance="a\\"\\\\\\n"} 3\n'
        in text
    )


def test_the_text_parses_as_prometheus() -> None:
    from prometheus_client.parser import text_string_to_metric_families

    counters = Counters()
    for metric in METRICS:
        counters.set(metric.name, 1.5)
    families = list(
        text_string_to_metric_families(render_prometheus([({"instance": "x"}, counters.snapshot())]))
    )
    assert len(families) == len(METRICS)
