"""Dashboards are those of the table, do not overlap, and ask only for what exists."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import yaml

from libs.common.telemetry.metric_tables.table import METRICS
from tests.monitoring.queries import DASHBOARDS, NAMES, SCRIPT, expressions, promql
from tests.monitoring.rules import MONITORING, run_promtool, unknown_names
from tests.support.promql.alerting import seconds_of
from tests.support.promql.evaluation import evaluate
from tests.support.promql.series import Series


def test_the_files_are_those_of_the_script() -> None:
    folder = MONITORING / "dashboards"
    assert sorted(path.stem for path in folder.glob("*.json")) == NAMES
    for name in NAMES:
        text = SCRIPT["text_of"](DASHBOARDS[name])
        assert (folder / f"{name}.json").read_text() == text, "python scripts/gen_dashboards.py"
    (generator,) = yaml.safe_load((MONITORING / "kustomization.yaml").read_text())["configMapGenerator"]
    assert generator["files"] == [f"dashboards/{name}.json" for name in NAMES]


def test_ids_are_unique() -> None:
    assert len({dashboard["uid"] for dashboard in DASHBOARDS.values()}) == len(NAMES) == 4
    for dashboard in DASHBOARDS.values():
        ids = [panel["id"] for panel in dashboard["panels"]]
        assert len(set(ids)) == len(ids)
        for panel in dashboard["panels"]:
            refs = [target["refId"] for target in panel.get("targets", ())]
            assert len(set(refs)) == len(refs)


@pytest.mark.parametrize("name", NAMES)
def test_panels_do_not_overlap_and_fit(name: str) -> None:
    cells: set[tuple[int, int]] = set()
    for panel in DASHBOARDS[name]["panels"]:
        at = panel["gridPos"]
        mine = set(itertools.product(range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"])))
        assert not mine & cells, panel["title"]
        assert max(x for x, _ in mine) < 24
        cells |= mine


@pytest.mark.parametrize("name", NAMES)
def test_queries_ask_for_series_and_labels_that_exist(name: str) -> None:
    for expression in expressions(DASHBOARDS[name]):
        assert not list(unknown_names(expression))
        assert "vllm" not in expression
        labels = {"le", "namespace", "instance"}
        for metric in METRICS.values():
            if metric.name in expression:
                labels |= set(metric.labels)
        for grouped in re.findall(r"by \(([^)]*)\)", expression):
            assert set(grouped.split(", ")) <= labels, expression


@pytest.mark.parametrize("name", NAMES)
def test_promtool_takes_every_query(name: str, tmp_path: Path) -> None:
    rules = [
        {"record": f"dashboard:query{number}", "expr": promql(expression)}
        for number, expression in enumerate(expressions(DASHBOARDS[name]))
    ]
    assert rules
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": name, "rules": rules}]}))
    run_promtool("check", "rules", str(file))


# Three kinds of queries by the titles of their panels, and their values on SERIES: two routers and a worker.
ASKED: dict[str, list[tuple[str, float]]] = {
    "Share that fails": [("{}", 0.01)],
    "Running and waiting at routers": [('{instance="a"}', 3), ('{instance="b"}', 4)],
    "Ready workers": [('{worker_role="decode"}', 2)],
}
SERIES = {
    'slipstream_requests_failed_total{instance="a"}': "0+1x20",
    'slipstream_requests_failed_total{instance="b"}': "0+1x20",
    'slipstream_requests_finished_total{instance="a",finish_reason="stop"}': "0+99x20",
    'slipstream_requests_finished_total{instance="b",finish_reason="stop"}': "0+99x20",
    'slipstream_requests_running{instance="a"}': "3x20",
    'slipstream_requests_running{instance="b"}': "4x20",
    'slipstream_requests_running{instance="worker"}': "7x20",
    'slipstream_prefix_index_blocks{instance="a"}': "1x20",
    'slipstream_prefix_index_blocks{instance="b"}': "1x20",
    'slipstream_workers{instance="a",worker_role="decode"}': "2x20",
    'slipstream_workers{instance="b",worker_role="decode"}': "2x20",
}


def asked_of(title: str) -> str:
    """The query of a panel of the overview."""
    panels = {panel["title"]: panel for panel in DASHBOARDS["overview"]["panels"]}
    return promql(panels[title]["targets"][0]["expr"])


@pytest.mark.parametrize("title", ASKED)
def test_a_share_is_a_share(title: str) -> None:
    series = Series()
    for name, values in SERIES.items():
        series.add_notation(name, values, 15.0)
    found = evaluate(asked_of(title), series, seconds_of("4m"))
    assert len(found) == len(ASKED[title])
    for labels, value in ASKED[title]:
        key = frozenset(re.findall(r'(\w+)="(\w+)"', labels))
        assert found[key] == pytest.approx(value)


def test_promtool_has_the_same_shares(tmp_path: Path) -> None:
    test = {
        "interval": "15s",
        "input_series": [{"series": name, "values": values} for name, values in SERIES.items()],
        "promql_expr_test": [
            {
                "expr": asked_of(title),
                "eval_time": "4m",
                "exp_samples": [{"labels": labels, "value": value} for labels, value in samples],
            }
            for title, samples in ASKED.items()
        ],
    }
    file = tmp_path / "test.yaml"
    file.write_text(yaml.safe_dump({"evaluation_interval": "15s", "tests": [test]}))
    run_promtool("test", "rules", str(file))
