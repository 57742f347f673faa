"""The queries of our dashboards and rules, as PromQL."""

from __future__ import annotations

import functools
import runpy
from collections.abc import Iterable, Mapping
from typing import Any

from tests.monitoring.rules import ROOT, rules
from tests.support.promql.series import Series
from tests.support.promql.syntax import Selector, parse, selectors

SCRIPT = runpy.run_path(str(ROOT / "scripts" / "gen_dashboards.py"))
DASHBOARDS: dict[str, dict[str, Any]] = SCRIPT["dashboards"]()
NAMES = sorted(DASHBOARDS)
# Values of Grafana's variables, so that an expression is PromQL.
VARIABLES = {"$__rate_interval": "1m", "$namespace": ".*", "$instance": ".*"}


def expressions(dashboard: dict[str, Any]) -> list[str]:
    """The queries of all panels."""
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]


def promql(expression: str) -> str:
    """The expression with values in place of variables. Raises AssertionError for an unknown one."""
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    assert "$" not in expression, expression
    return expression


@functools.cache
def panel_queries() -> tuple[str, ...]:
    """Those of all dashboards."""
    return tuple(promql(each) for name in NAMES for each in expressions(DASHBOARDS[name]))


def rule_queries() -> list[str]:
    """Those of all rules, in the order of the file."""
    return [rule["expr"] for rule in rules()]


def unanswered(expression: str, series: Series, at_s: float) -> Iterable[Selector]:
    """The selectors that take no series at that time."""
    for selector in selectors(parse(expression)):
        if not (series.ranges if selector.range_s else series.now)(selector, at_s):
            yield selector


def target(instance: str, namespace: str = "slipstream") -> Mapping[str, str]:
    """The labels that Prometheus adds to the series of a process."""
    return {"instance": instance, "namespace": namespace, "job": f"{namespace}/slipstream"}
