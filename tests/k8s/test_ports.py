"""Ports in manifests are those that services listen on, docs/security.md lists and policies open."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.k8s.renders import (
    RENDERS,
    ROOT,
    Object,
    PodTemplate,
    name_of,
    of_kind,
    pods,
    render,
    selects,
    services_of,
)

POLICIES = "components/network-policies"
POD_COSTS = "components/pod-costs"
_LISTENS = ("listen", "http", "admin", "admin-http", "kv-listen")
_ETCD_LISTENS = ("listen-client-urls", "listen-peer-urls", "listen-metrics-urls")


def listened(pod: PodTemplate) -> set[int]:
    """The ports that the process binds, by its arguments."""
    arguments = pod.arguments()
    if pod.tier == "postgresql":
        return {int(arguments["port"])}
    addresses = [arguments[name] for name in (*_LISTENS, *_ETCD_LISTENS) if name in arguments]
    return {int(address.rpartition(":")[2]) for address in addresses}


def documented() -> dict[str, set[int]]:
    """The ports of each tier in the table of docs/security.md."""
    found: dict[str, set[int]] = {}
    text = (ROOT / "docs" / "security.md").read_text()
    table = text.partition("| Pod | Port | Of | Callers |")[2].partition("\n\n")[0]
    for line in table.splitlines()[2:]:
        tiers, port = (cell.strip() for cell in line.split("|")[1:3])
        for tier in tiers.split(", "):
            found.setdefault(tier, set()).update(map(int, re.findall(r"^\d+$", port)))
    return found


@pytest.mark.parametrize("name", RENDERS)
def test_every_port_is_one_that_the_service_listens_on(name: str) -> None:
    for pod in services_of(render(name)):
        ports = {port["containerPort"] for port in pod.main["ports"]}
        assert ports == listened(pod) == documented()[pod.tier], pod.owner


@pytest.mark.parametrize("name", RENDERS)
def test_every_service_port_is_one_of_its_pods(name: str) -> None:
    objects = render(name)
    for service in of_kind(objects, "Service"):
        selector = {"matchLabels": service["spec"]["selector"]}
        selected = [pod for pod in services_of(objects) if selects(selector, pod.labels)]
        assert selected, name_of(service)
        for port in service["spec"]["ports"]:
            for pod in selected:
                named = {each["name"]: each["containerPort"] for each in pod.main["ports"]}
                assert named[port["targetPort"]] == port["port"], name_of(service)


def policies_of(objects: tuple[Object, ...], pod: PodTemplate, direction: str) -> list[Object]:
    """The policies that select the pod, in one direction."""
    return [
        policy
        for policy in of_kind(objects, "NetworkPolicy")
        if selects(policy["spec"]["podSelector"], pod.labels) and direction in policy["spec"]["policyTypes"]
    ]


def opened(policies: list[Object]) -> Iterator[tuple[int, int]]:
    """The ranges of ports that the policies let in."""
    for policy in policies:
        for rule in policy["spec"].get("ingress", ()):
            assert rule.get("ports"), f"{name_of(policy)} opens every port"
            for port in rule["ports"]:
                yield port["port"], port.get("endPort", port["port"])


WITH_POLICIES = [name for name in RENDERS if name.startswith("overlays/")] + [POLICIES, POD_COSTS]


@pytest.mark.parametrize("name", WITH_POLICIES)
def test_policies_select_every_pod_and_open_the_ports_that_it_has(name: str) -> None:
    objects = render(name)
    for pod in pods(objects):
        for direction in ("Ingress", "Egress"):
            assert policies_of(objects, pod, direction), f"{pod.owner} is open: {direction}"
        if pod.kind == "Job" or pod.tier == "pod-costs":  # probes of its node's kubelet pass always
            assert not list(opened(policies_of(objects, pod, "Ingress")))
            continue
        ranges = set(opened(policies_of(objects, pod, "Ingress")))
        has_memory = pod.arguments().get("transport") == "rdma" and pod.tier != "drafter"
        mooncake = {(12300, 14300), (15000, 17000)} if has_memory else set()
        assert ranges == {(port, port) for port in listened(pod)} | mooncake, pod.owner


@pytest.mark.parametrize("name", WITH_POLICIES)
def test_only_the_ports_of_clients_are_open_to_everyone(name: str) -> None:
    for policy in of_kind(render(name), "NetworkPolicy"):
        for rule in policy["spec"].get("ingress", ()):
            if "from" not in rule:
                assert policy["metadata"]["name"] == "slipstream-router"
                assert {port["port"] for port in rule["ports"]} == {7000, 8000}
            for peer in rule.get("from", ()):
                assert peer.get("podSelector") or peer["namespaceSelector"].get("matchLabels"), policy


@pytest.mark.parametrize("name", WITH_POLICIES)
def test_each_tier_reaches_those_that_it_calls_and_no_client_reaches_a_worker(name: str) -> None:
    objects = render(name)
    tiers = {pod.tier: pod for pod in services_of(objects)}
    calls = {
        ("router", "prefill", 7000), ("router", "decode", 7000), ("router", "kvstore", 7000),
        ("router", "drafter", 7000), ("router", "router", 7001),
        ("decode", "prefill", 7000), ("prefill", "prefill", 7000),
        ("prefill", "decode", 7000), ("decode", "decode", 7000), ("prefill", "kvstore", 7000),
        ("decode", "kvstore", 7000), ("decode", "drafter", 7000), ("decode", "prefill", 7100),
        ("prefill", "prefill", 7100), ("prefill", "kvstore", 7100), ("prefill", "decode", 7100),
        ("decode", "kvstore", 7100), ("decode", "decode", 7100), ("drafter", "decode", 7100),
        ("kvstore", "prefill", 7100),
        ("kvstore", "decode", 7100), ("kvstore", "kvstore", 7100), ("etcd", "etcd", 2380),
        *((tier, "etcd", 2379) for tier in ("router", "prefill", "decode", "kvstore", "drafter")),
    }  # fmt: skip
    if name == POD_COSTS:
        calls.add(("pod-costs", "router", 7001))
    outsiders = {**{tier: pod.labels for tier, pod in tiers.items()}, "client": {"app": "web"}}
    admitted = {
        (caller, tier, port["port"])
        for caller, labels in outsiders.items()
        for tier, pod in tiers.items()
        for policy in policies_of(objects, pod, "Ingress")
        for rule in policy["spec"].get("ingress", ())
        if any(selects(peer["podSelector"], labels) for peer in rule.get("from", ()) if "podSelector" in peer)
        for port in rule["ports"]
    }
    mooncake = {call for call in admitted if call[2] in (12300, 15000)}
    assert admitted - mooncake == calls
    # A drafter reads features at decode workers, and no KV.
    assert {call for call in mooncake if "drafter" in call} <= {("drafter", "decode", 15000)}
