"""ServiceMonitors scrape every pod once, keep the labels of our series, and ask as the pods serve."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from libs.common.telemetry.metric_tables.table import SECTIONS
from tests.k8s.renders import (
    GROUPS,
    RENDERS,
    TIERS,
    Object,
    PodTemplate,
    of_kind,
    render,
    selects,
    services_of,
)

# What the Prometheus operator adds to series. Without honorLabels ours get the prefix exported_.
_ADDED = {"job", "instance", "namespace", "service", "pod", "container", "endpoint"}
MONITORED = (
    "components/monitoring",
    "components/monitoring+tls",
    *(name for name in RENDERS if name.partition("+")[0] in GROUPS),
)


def scrapes(objects: tuple[Object, ...]) -> Iterator[tuple[Object, Object, Object, PodTemplate]]:
    """Each monitor, its endpoint, the Service and the pod of which Prometheus makes a target.

    The operator keeps the addresses of selected Services whose port has the endpoint's name.
    """
    for monitor in of_kind(objects, "ServiceMonitor"):
        for service in of_kind(objects, "Service"):
            if not selects(monitor["spec"]["selector"], service["metadata"].get("labels", {})):
                continue
            ports = {port["name"] for port in service["spec"]["ports"]}
            for endpoint in monitor["spec"]["endpoints"]:
                for pod in services_of(objects) if endpoint["port"] in ports else ():
                    if selects({"matchLabels": service["spec"]["selector"]}, pod.labels):
                        yield monitor, endpoint, service, pod


@pytest.mark.parametrize("name", MONITORED)
def test_every_pod_is_scraped_once_by_each_of_its_addresses(name: str) -> None:
    objects = render(name)
    found = Counter(pod.owner for _, _, _, pod in scrapes(objects))
    wanted = [pod.owner for pod in services_of(objects) if pod.tier in (*TIERS, "etcd")]
    assert found == Counter(wanted)
    for monitor, endpoint, service, pod in scrapes(objects):
        # Only a headless Service has the pods' addresses as they are, and only so one that is not ready.
        assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"]
        (target,) = [
            each["targetPort"] for each in service["spec"]["ports"] if each["name"] == endpoint["port"]
        ]
        assert target == ("etcd-metrics" if pod.tier == "etcd" else "admin-http")
        assert target in {port["name"] for port in pod.main["ports"]}
        assert "jobLabel" not in monitor["spec"], "alerts select jobs by the names of Services"
        assert service["metadata"]["name"].startswith("slipstream-")


def test_a_second_service_with_the_port_is_found() -> None:
    objects = render("components/monitoring")
    (service,) = [
        each
        for each in of_kind(objects, "Service")
        if each["metadata"]["name"] == "slipstream-router-metrics"
    ]
    twin = {**service, "metadata": {**service["metadata"], "name": "slipstream-router-twin"}}
    found = Counter(pod.owner for _, _, _, pod in scrapes((*objects, twin)))
    assert found["Deployment/slipstream-router"] == 2


def test_a_monitor_honours_labels_where_one_of_ours_is_also_the_operators() -> None:
    tiers: dict[str, set[str]] = {}
    monitors = {}
    for monitor, _, _, pod in scrapes(render("components/monitoring")):
        monitors[monitor["metadata"]["name"]] = monitor
        tiers.setdefault(monitor["metadata"]["name"], set()).add(pod.tier)
    assert len(tiers) == 3
    for name, monitor in monitors.items():
        ours = {
            label
            for section in SECTIONS
            if tiers[name] & set(section.services)
            for metric in section.metrics
            for label in metric.labels
        }
        assert not ours & {"job", "instance"}, "a scrape states these two"
        for endpoint in monitor["spec"]["endpoints"]:
            assert endpoint.get("honorLabels", False) is bool(ours & _ADDED), name


@pytest.mark.parametrize("name", MONITORED)
def test_a_monitor_scrapes_by_the_scheme_of_the_probes(name: str) -> None:
    for _, endpoint, _, pod in scrapes(render(name)):
        scheme = pod.main["readinessProbe"]["httpGet"].get("scheme", "HTTP")
        assert endpoint["scheme"].upper() == scheme, pod.owner
        assert ("tlsConfig" in endpoint) is (scheme == "HTTPS"), pod.owner
