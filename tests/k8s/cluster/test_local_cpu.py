"""local-cpu on a real Kubernetes: the demo's conversation, and disturbances that fail no request."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from bench.demo.__main__ import DemoConversation
from bench.demo.script import TURNS
from slipstream.async_client import AsyncClient
from tests.k8s.cluster.conftest import START_S, WORKLOADS, Deployed, doubled
from tests.k8s.cluster.kubectl import ENDED
from tests.k8s.cluster.load import ROUTER, Load

pytestmark = [pytest.mark.k8s, pytest.mark.timeout(3600)]
_MORE = 6  # requests of each kind before and after a disturbance


@contextmanager
def undisturbed(deployed: Deployed) -> Iterator[Load]:
    """Load around the block, of which no request fails."""
    with deployed.new_load() as load:
        load.wait_done(_MORE)
        yield load
        load.wait_done(_MORE)
        counts = load.finish()
    check(counts)


def check(counts: dict[str, Any]) -> None:
    """No request failed, over the SDK or over HTTP."""
    for kind in ("sdk", "http"):
        assert counts[kind]["failed"] == 0, f"{kind}: {counts[kind]}"
        assert counts[kind]["done"] >= 2 * _MORE


async def test_the_demo_conversation_through_the_service(deployed: Deployed) -> None:
    with deployed.kubectl.forwarded("service/slipstream-router", 7000) as endpoint:
        async with AsyncClient(endpoint, api_key=deployed.api_key) as client:
            conversation = DemoConversation(client)
            for turn in TURNS:
                await conversation.turn(turn, {})
    assert conversation.problems == []
    assert any(reply.usage is not None and reply.usage.cached_tokens for reply in conversation.replies)


@pytest.mark.parametrize("tier", WORKLOADS)
def test_a_rolling_update_of_each_tier_fails_no_request(deployed: Deployed, tier: str) -> None:
    before = deployed.kubectl.pods(tier)
    with undisturbed(deployed):
        deployed.kubectl("rollout", "restart", WORKLOADS[tier])
        deployed.kubectl.wait_rolled(WORKLOADS[tier], timeout_s=START_S)
    if tier in ("kvstore", "etcd"):  # a StatefulSet's pods keep their names
        assert deployed.kubectl.pods(tier) == before
    else:
        assert not set(before) & set(deployed.kubectl.pods(tier))


@pytest.mark.parametrize("tier", ["router", "prefill", "decode", "kvstore", "drafter", "etcd"])
def test_a_killed_pod_fails_no_stream_of_the_sdk(deployed: Deployed, tier: str) -> None:
    victim = deployed.kubectl.pods(tier)[0]
    alone = [tier] if tier in ("prefill", "decode") else []
    with doubled(deployed.kubectl, *alone), deployed.new_load() as load:
        load.wait_done(_MORE)
        deployed.kubectl("delete", "pod", victim, "--grace-period=0", "--force")
        load.wait_done(_MORE)
        deployed.kubectl.wait_rolled(WORKLOADS[tier], timeout_s=START_S)
        counts = load.finish()
    assert counts["sdk"]["failed"] == 0, counts
    if tier != "router":  # an HTTP answer ends with the router that makes it
        assert counts["http"]["failed"] == 0, counts


@pytest.mark.parametrize("tier", ["router", "prefill", "decode", "drafter", "kvstore"])
def test_a_tier_scales_up_and_down_under_load(deployed: Deployed, tier: str) -> None:
    kubectl, workload = deployed.kubectl, WORKLOADS[tier]
    least = len(kubectl.pods(tier))
    with undisturbed(deployed) as load:
        kubectl("scale", workload, f"--replicas={least + 1}")
        kubectl.wait_rolled(workload, timeout_s=START_S)
        assert len(kubectl.pods(tier)) == least + 1
        load.wait_done(_MORE)
        kubectl("scale", workload, f"--replicas={least}")
        deadline_s = time.monotonic() + START_S
        while len(kubectl.pods(tier)) > least:
            assert time.monotonic() < deadline_s
            time.sleep(0.5)


def test_a_drained_node_fails_no_request(deployed: Deployed) -> None:
    kubectl = deployed.kubectl
    nodes = [
        node["metadata"]["name"]
        for node in kubectl.json("get", "nodes")["items"]
        if not node["spec"].get("unschedulable") and not node["spec"].get("taints")
    ]
    if len(nodes) < 2:
        pytest.skip("the drain of a node needs a second one that takes its pods")
    pod = kubectl.json("get", "pod", kubectl.pods("decode")[0])
    with doubled(kubectl, "prefill", "decode"), undisturbed(deployed):
        try:
            kubectl(
                "drain", pod["spec"]["nodeName"], "--ignore-daemonsets", "--delete-emptydir-data",
                "--pod-selector=app.kubernetes.io/name=slipstream", f"--timeout={START_S:.0f}s",
                timeout_s=START_S + 10,
            )  # fmt: skip
            for workload in WORKLOADS.values():
                kubectl.wait_rolled(workload, timeout_s=START_S)
        finally:
            kubectl("uncordon", pod["spec"]["nodeName"])


def test_no_pod_restarted_by_itself(deployed: Deployed) -> None:
    """Probes, limits and the stop sequence fit: what ended, this suite ended."""
    restarts = {
        pod["metadata"]["name"]: status["restartCount"]
        for pod in deployed.kubectl.json("get", "pods")["items"]
        if pod["status"]["phase"] not in ENDED
        for status in pod["status"]["containerStatuses"]
    }
    assert {name: count for name, count in restarts.items() if count} == {}


_ENFORCED = pytest.mark.skipif(
    not os.environ.get("SLIPSTREAM_TEST_POLICIES"),
    reason="SLIPSTREAM_TEST_POLICIES=1 says that this cluster's network enforces NetworkPolicies",
)


@_ENFORCED
def test_policies_let_routers_ask_each_other(deployed: Deployed) -> None:
    first, second = deployed.kubectl.pods("router")[:2]
    address = deployed.kubectl.json("get", "pod", second)["status"]["podIP"]
    dial = f"import socket; socket.create_connection(({address!r}, 7001), timeout=5)"
    deployed.kubectl("exec", first, "--", "python", "-c", dial)


@_ENFORCED
def test_policies_close_the_ports_of_workers(deployed: Deployed) -> None:
    worker = deployed.kubectl.json("get", "pod", deployed.kubectl.pods("decode")[0])["status"]["podIP"]
    etcd = deployed.kubectl.json("get", "pod", deployed.kubectl.pods("etcd")[0])["status"]["podIP"]
    with deployed.new_load() as load:
        for address, port in ((worker, 7000), (worker, 7100), (worker, 9090), (etcd, 2379)):
            assert not load.reaches(address, port), f"{address}:{port} is open"
        assert load.reaches(ROUTER, 8000)
        load.finish()
