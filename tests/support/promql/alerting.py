"""Rules of a file, evaluated step by step as Prometheus does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.support.promql.evaluation import evaluate
from tests.support.promql.series import Labels, Series
from tests.support.promql.syntax import parse

_FOR_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def seconds_of(duration: str) -> float:
    """`90m`, `1h` or a number of seconds."""
    return float(duration[:-1]) * _FOR_UNITS_S[duration[-1]] if duration[-1].isalpha() else float(duration)


class RuleEvaluation:
    """Records what recording rules say into `series`, and knows since when each alert is active."""

    def __init__(self, rules: Sequence[Mapping[str, Any]], series: Series) -> None:
        for rule in rules:
            parse(rule["expr"])
            unknown = set(rule) - {"alert", "record", "expr", "for", "labels", "annotations"}
            assert not unknown, unknown
        self._rules = rules
        self._series = series
        self._since_s: dict[tuple[str, Labels], float] = {}
        self._recorded: dict[str, set[Labels]] = {}

    def step(self, at_s: float) -> dict[str, list[dict[str, str]]]:
        """Evaluate every rule once. Returns the labels of the alerts that fire, by name."""
        firing: dict[str, list[dict[str, str]]] = {}
        for rule in self._rules:
            found = evaluate(rule["expr"], self._series, at_s)
            if "record" in rule:
                self._record(rule["record"], found, at_s)
                continue
            name = rule["alert"]
            for key in [key for key in self._since_s if key[0] == name and key[1] not in found]:
                del self._since_s[key]
            for labels in found:
                since_s = self._since_s.setdefault((name, labels), at_s)
                if at_s - since_s >= seconds_of(str(rule.get("for", "0"))):
                    firing.setdefault(name, []).append({**dict(labels), **rule.get("labels", {})})
        return firing

    def _record(self, name: str, found: Mapping[Labels, float], at_s: float) -> None:
        before = self._recorded.get(name, set())
        self._recorded[name] = set(found)
        for labels in before - set(found):
            self._series.add(name, dict(labels), at_s, float("nan"))
        for labels, value in found.items():
            self._series.add(name, dict(labels), at_s, value)
