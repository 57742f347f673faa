"""The PrometheusRule of Kubernetes has the alerts of the plain file."""

from __future__ import annotations

import runpy

import yaml

from tests.k8s.renders import of_kind, render
from tests.monitoring.rules import MONITORING, ROOT


def test_the_manifest_is_that_of_the_script() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "gen_alerts.py"))
    assert script["MANIFEST"].read_text() == script["render"](), "python scripts/gen_alerts.py"
    groups = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"]
    assert yaml.safe_load(script["render"]())["spec"] == {"groups": groups}


def test_the_component_brings_rules_and_dashboards() -> None:
    objects = render("components/monitoring")
    (rule,) = of_kind(objects, "PrometheusRule")
    assert rule["spec"]["groups"]
    (shown,) = [
        item
        for item in of_kind(objects, "ConfigMap")
        if "grafana_dashboard" in item["metadata"].get("labels", {})
    ]
    assert set(shown["data"]) == {path.name for path in (MONITORING / "dashboards").glob("*.json")}
