"""Alerts fire when they should and not a moment before, and read only series that services export."""

from __future__ import annotations

import copy
import functools
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from supervisor.run_directory import SCRAPE_FILE
from tests.monitoring.rules import (
    CASES,
    MONITORING,
    ROOT,
    alerts,
    load_yaml,
    rules,
    run_promtool,
    unknown_names,
)
from tests.support.promql.alerting import RuleEvaluation, seconds_of
from tests.support.promql.series import Series

SEVERITIES = {"critical", "warning"}


@functools.cache
def cases() -> tuple[dict[str, Any], ...]:
    """The cases of promtool's test file."""
    return tuple(load_yaml(CASES)["tests"])


def test_names_are_unique_and_severities_a_closed_set() -> None:
    names = [rule["alert"] for rule in alerts()]
    assert len(set(names)) == len(names)
    recorded = [rule["record"] for rule in rules() if "record" in rule]
    assert len(set(recorded)) == len(recorded)
    for rule in alerts():
        assert re.fullmatch(r"Slipstream[A-Z][A-Za-z]+", rule["alert"])
        assert set(rule["labels"]) == {"severity"} and rule["labels"]["severity"] in SEVERITIES
        assert set(rule["annotations"]) == {"summary", "runbook"}


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule.get("alert") or rule["record"])
def test_each_rule_reads_series_that_exist(rule: dict[str, str]) -> None:
    assert not list(unknown_names(rule["expr"]))
    # A router exports vLLM's names for all workers, and each worker for itself.
    assert "vllm" not in rule["expr"]


def test_the_check_finds_names_that_do_not_exist() -> None:
    wrong = 'rate(slipstream_no_such_total{x="slipstream_in_a_value"}[5m]) + vllm:nothing'
    assert list(unknown_names(wrong)) == ["slipstream_no_such_total", "vllm:nothing"]
    histogram = "slipstream_time_to_first_token_seconds"
    assert list(unknown_names(f"{histogram} + {histogram}_sum + slipstream:errors:ratio_rate5m")) == [
        histogram
    ]


def test_each_alert_has_a_case_that_fires_and_a_near_miss() -> None:
    fires: set[str] = set()
    misses: set[str] = set()
    for case in cases():
        name = case["name"].partition(":")[0]
        checks = case["alert_rule_test"]
        assert checks
        assert {check["alertname"] for check in checks} == {name}
        (fires if any(check["exp_alerts"] for check in checks) else misses).add(name)
    named = {rule["alert"] for rule in alerts()}
    assert fires == misses == named


def test_promtool_takes_the_rules_and_the_configuration_of_a_local_cluster() -> None:
    run_promtool("check", "rules", str(MONITORING / "alerts.yaml"))
    run_promtool("check", "config", str(MONITORING / "prometheus.yaml"))


def test_the_configuration_finds_what_the_supervisor_writes() -> None:
    config = load_yaml(MONITORING / "prometheus.yaml")
    (job,) = config["scrape_configs"]
    assert re.fullmatch(r"(.*/)?slipstream.*", job["job_name"])
    assert job["file_sd_configs"] == [{"files": [f"../../.run/{SCRAPE_FILE}"]}]


def test_the_documents_count_the_alerts() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    assert f"`deploy/monitoring/alerts.yaml` has {len(alerts())}:" in text


def test_alerts_fire_in_their_cases_and_in_no_near_miss(tmp_path: Path) -> None:
    # A case states labels. promtool would compare the sentences of annotations too.
    file = copy.deepcopy(load_yaml(MONITORING / "alerts.yaml"))
    for rule in (rule for group in file["groups"] for rule in group["rules"]):
        rule.pop("annotations", None)
    (tmp_path / "RULES").write_text(yaml.safe_dump(file))
    (tmp_path / "cases.yaml").write_text(CASES.read_text())
    run_promtool("test", "rules", str(tmp_path / "cases.yaml"))


@pytest.mark.parametrize("case", cases(), ids=lambda case: case["name"])
def test_an_alert_fires_in_its_case_and_in_no_near_miss(case: dict[str, Any]) -> None:
    """The same as promtool's test, by an evaluator of our own: promtool is not installed everywhere."""
    name = case["name"].partition(":")[0]
    (alert,) = [rule for rule in alerts() if rule["alert"] == name]
    recorded = [rule for rule in rules() if "record" in rule and rule["record"] in alert["expr"]]
    series, interval_s = Series(), seconds_of(case["interval"])
    for stated in case["input_series"]:
        series.add_notation(stated["series"], stated["values"], interval_s)
    evaluation = RuleEvaluation([*recorded, alert], series)
    checks = {seconds_of(check["eval_time"]): check["exp_alerts"] for check in case["alert_rule_test"]}
    for at_s in range(0, int(max(checks)) + 1, 60):
        firing = evaluation.step(at_s).get(name, [])
        if at_s in checks:
            wanted = [alert["exp_labels"] for alert in checks.pop(at_s)]
            assert sorted(map(sorted, map(dict.items, firing))) == sorted(
                map(sorted, map(dict.items, wanted))
            ), f"after {at_s} s"
    assert not checks, "an alert is checked at whole minutes"


@pytest.mark.parametrize("case", cases(), ids=lambda case: case["name"])
def test_a_case_has_series_that_its_alert_reads(case: dict[str, Any]) -> None:
    name = case["name"].partition(":")[0]
    recorded = {rule["record"]: rule["expr"] for rule in rules() if "record" in rule}
    (expression,) = [rule["expr"] for rule in alerts() if rule["alert"] == name]
    expression += "".join(expr for record, expr in recorded.items() if record in expression)
    for series in case["input_series"]:
        assert series["series"].partition("{")[0] in expression
