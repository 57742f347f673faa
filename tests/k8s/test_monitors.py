"""PodMonitors keep the labels of our series, and scrape as the pods serve."""

from __future__ import annotations

import pytest

from libs.common.telemetry.metric_table import SECTIONS
from tests.k8s.renders import OVERLAYS, TIERS, of_kind, pods, render, selects

# What the Prometheus operator adds to a pod's series. Without honorLabels ours get the prefix exported_.
_ADDED = {"job", "instance", "namespace", "pod", "container", "endpoint"}


def test_a_monitor_honours_labels_where_one_of_ours_is_also_the_operators() -> None:
    for monitor in of_kind(render("components/monitoring"), "PodMonitor"):
        name = "app.kubernetes.io/name"
        tiers = {
            tier
            for tier in TIERS
            if selects(
                monitor["spec"]["selector"],
                {name: "slipstream", "app.kubernetes.io/component": tier},
            )
        }
        ours = {
            label
            for section in SECTIONS
            if tiers & set(section.services)
            for metric in section.metrics
            for label in metric.labels
        }
        assert not ours & {"job", "instance"}, "a scrape states these two"
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            assert endpoint.get("honorLabels", False) is bool(ours & _ADDED), monitor["metadata"]["name"]


@pytest.mark.parametrize("name", ["components/monitoring", *OVERLAYS])
def test_a_monitor_scrapes_by_the_scheme_of_the_probes(name: str) -> None:
    objects = render(name)
    for monitor in of_kind(objects, "PodMonitor"):
        for pod in pods(objects):
            if pod.tier in TIERS and selects(monitor["spec"]["selector"], pod.labels):
                scheme = pod.main["readinessProbe"]["httpGet"].get("scheme", "HTTP")
                for endpoint in monitor["spec"]["podMetricsEndpoints"]:
                    assert endpoint["scheme"].upper() == scheme, pod.owner
                    assert ("tlsConfig" in endpoint) is (scheme == "HTTPS"), pod.owner
