"""What every pod has: probes, resources, a security context, time to end, a budget, a policy."""

from __future__ import annotations

import pytest

from libs.common.cluster.worker_record import Role
from libs.common.runtime.settings import rows
from libs.common.worker_bounds import END_S
from supervisor.configuration.cluster_file import SETTINGS
from tests.k8s.renders import RENDERS, TIERS, PodTemplate, of_kind, pods, render, selects, services_of

PROBES = ("startupProbe", "livenessProbe", "readinessProbe")
# No worker that has loaded is started again because etcd is unavailable: startup probes do not ask for
# readiness.
_PATHS = {
    "startupProbe": ("/livez", "/readyz", "/healthz/live", "/healthz/started"),
    "livenessProbe": ("/livez", "/healthz/live"),
    "readinessProbe": ("/readyz", "/healthz/ready"),
}


@pytest.mark.parametrize("name", RENDERS)
def test_every_service_has_every_probe_on_its_own_port(name: str) -> None:
    for pod in services_of(render(name)):
        ports = {port["name"] for port in pod.main["ports"]}
        for kind in PROBES:
            if pod.tier == "postgresql":  # speaks no HTTP
                probe = pod.main[kind]
                assert "pg_isready" in probe.get("exec", {}).get("command", ()) or (
                    probe["tcpSocket"]["port"] in ports
                )
                continue
            probe = pod.main[kind]["httpGet"]
            assert probe["port"] in ports, pod.owner
            assert probe["path"] in _PATHS[kind], pod.owner
            assert probe.get("scheme", "HTTP") == ("HTTPS" if serves_https(pod) else "HTTP"), pod.owner
        liveness = pod.main["livenessProbe"]
        # A process that is only busy is not killed: the router gives up a silent worker after 2 s by itself.
        assert liveness["periodSeconds"] * liveness["failureThreshold"] >= 30, pod.owner


def serves_https(pod: PodTemplate) -> bool:
    """Whether the pod's process has a certificate, as with component tls."""
    mounts = {mount["name"] for mount in pod.main.get("volumeMounts", ())}
    return pod.tier in TIERS and "peer-tls" in mounts


@pytest.mark.parametrize("name", RENDERS)
def test_every_container_is_confined(name: str) -> None:
    for pod in pods(render(name)):
        spec = pod.spec
        own_account = "slipstream-pod-costs" if pod.tier == "pod-costs" else "slipstream"
        assert spec["serviceAccountName"] == own_account
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False, f"{pod.owner}: Services would become settings"
        context = spec["securityContext"]
        assert context["runAsNonRoot"] is True
        assert {context["runAsUser"], context["runAsGroup"], context["fsGroup"]} == {65532}
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in (*spec["containers"], *spec.get("initContainers", ())):
            confined = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True}
            assert container["securityContext"] == {**confined, "capabilities": {"drop": ["ALL"]}}
            resources = container["resources"]
            assert {"cpu", "memory"} <= set(resources["requests"]), pod.owner
            assert "memory" in resources["limits"], pod.owner
        for volume in spec["volumes"]:
            assert "hostPath" not in volume, pod.owner
        assert not spec.get("hostNetwork") and not spec.get("hostPID")


@pytest.mark.parametrize("name", RENDERS)
def test_every_process_has_a_place_to_write(name: str) -> None:
    for pod in services_of(render(name)):
        empty = {volume["name"] for volume in pod.spec["volumes"] if "emptyDir" in volume}
        assert any(m["mountPath"] == "/tmp" and m["name"] in empty for m in pod.main["volumeMounts"])


def drain_s(pod: PodTemplate) -> float:
    """The seconds that the service may drain."""
    if pod.tier not in TIERS:
        return 5.0
    default: float = rows(SETTINGS[Role(pod.tier)])["drain_s"].default
    return float(pod.arguments().get("drain-s", default))


@pytest.mark.parametrize("name", RENDERS)
def test_the_grace_covers_the_sleep_and_the_drain(name: str) -> None:
    for pod in services_of(render(name)):
        sleep_s = pod.main.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        assert pod.tier in ("etcd", "postgresql", "pod-costs") or sleep_s >= 5, (
            f"{pod.owner} leaves no time for its Service to forget it"
        )
        assert pod.tier != "router" or sleep_s >= 10, "clients of a router come through a Service"
        spare_s = pod.spec["terminationGracePeriodSeconds"] - sleep_s - drain_s(pod)
        is_worker = pod.tier in ("prefill", "decode", "drafter")
        least_s = END_S if is_worker else 5
        assert spare_s >= least_s, f"{pod.owner}: {spare_s} s to spare"


@pytest.mark.parametrize("name", RENDERS)
def test_every_service_spreads_and_has_a_priority_and_a_budget(name: str) -> None:
    objects = render(name)
    budgets = of_kind(objects, "PodDisruptionBudget")
    for pod in services_of(objects):
        assert pod.spec["priorityClassName"].startswith("slipstream-")
        mine = [each for each in budgets if selects(each["spec"]["selector"], pod.labels)]
        assert [each["spec"]["maxUnavailable"] for each in mine] == [1], pod.owner
        if pod.kind == "DisaggregatedSet":  # whole nodes
            assert "podAffinity" in pod.spec["affinity"]
            continue
        spread = pod.spec["topologySpreadConstraints"]
        assert {"kubernetes.io/hostname", "topology.kubernetes.io/zone"} <= {e["topologyKey"] for e in spread}
        for each in spread:
            assert selects(each["labelSelector"], pod.labels), pod.owner


@pytest.mark.parametrize("name", RENDERS)
def test_rollouts_add_before_they_remove(name: str) -> None:
    for item in of_kind(render(name), "Deployment"):
        assert item["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
