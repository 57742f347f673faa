"""Every query of our dashboards and rules has a value on scrapes of all services, by our own evaluator."""

from __future__ import annotations

import math
import re

import pytest

from libs.common.telemetry.counters import Counters
from libs.common.telemetry.exposition import render_metrics
from libs.common.telemetry.metric_tables.table import SERVICES, metrics_of
from tests.monitoring.queries import panel_queries, rule_queries, target, unanswered
from tests.monitoring.rules import rules
from tests.support.promql.alerting import RuleEvaluation
from tests.support.promql.evaluation import evaluate
from tests.support.promql.series import Series
from tests.support.promql.syntax import parse, selectors

MINUTE_S = 60
END_S = 10 * MINUTE_S
# Series of Prometheus itself and of client libraries.
_NOT_OURS = {"up", "process_start_time_seconds"}


def label_values() -> dict[tuple[str, str], list[str]]:
    """The values of labels that queries name, by (series, label). tests/e2e has those of real processes."""
    found: dict[tuple[str, str], list[str]] = {}
    for query in rule_queries():
        for selector in selectors(parse(query)):
            for label, operator, value in selector.matchers:
                if not operator.startswith("!"):
                    found.setdefault((selector.name, label), []).extend(value.split("|"))
    return found


def filled(service: str, minute: int) -> Counters:
    """A service whose every counter and histogram grows each minute."""
    counters, stated = Counters(), label_values()
    for metric in metrics_of(service):
        values = [stated.get((metric.name, label), ["one"]) for label in metric.labels]
        for number in range(max(map(len, values), default=1)):
            labels = tuple(each[number % len(each)] for each in values)
            if metric.kind == "gauge":
                counters.set(metric.name, 0.5, labels)
            elif metric.kind == "counter":
                counters.add(metric.name, 10 * minute, labels)
            else:
                counters.observe(metric.name, 0.01, labels, count=10 * minute)
    return counters


@pytest.fixture(scope="module")
def series() -> Series:
    """Two processes of every service, scraped for ten minutes. The rules have recorded what they record."""
    found = Series()
    evaluation = RuleEvaluation(rules(), found)
    for minute in range(END_S // MINUTE_S + 1):
        for service in SERVICES:
            text = render_metrics(filled(service, minute), service=service)[0].decode()
            for number in range(2):
                found.add_scrape(text, target(f"{service}-{number}:9090"), minute * MINUTE_S)
        evaluation.step(minute * MINUTE_S)
    return found


@pytest.mark.parametrize("expression", panel_queries())
def test_every_panel_has_a_value(series: Series, expression: str) -> None:
    values = evaluate(expression.replace("[1m]", "[5m]"), series, END_S)
    assert values and all(math.isfinite(value) for value in values.values())


@pytest.mark.parametrize("expression", rule_queries())
def test_every_rule_reads_series_that_are_scraped(series: Series, expression: str) -> None:
    evaluate(expression, series, END_S)
    now = re.sub(r" offset \d+h", "", expression)
    missing = {selector.name for selector in unanswered(now, series, END_S)}
    assert missing <= _NOT_OURS


def test_a_query_of_what_no_service_exports_is_found(series: Series) -> None:
    wrong = 'rate(slipstream_no_such_total[5m]) > 0 and slipstream_kv_blocks{state="gone"}'
    assert [selector.name for selector in unanswered(wrong, series, END_S)] == [
        "slipstream_no_such_total",
        "slipstream_kv_blocks",
    ]
