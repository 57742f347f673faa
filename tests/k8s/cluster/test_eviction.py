"""Pods that a kubelet evicts: their volume is too full, or their node is."""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.k8s.cluster.conftest import START_S, WORKLOADS, Deployed, doubled
from tests.k8s.cluster.kubectl import ENDED, Kubectl

pytestmark = [pytest.mark.k8s, pytest.mark.timeout(3600)]
# `COMMAND start NODE` puts a node under memory pressure, `COMMAND stop NODE` ends it.
PRESSURE_COMMAND = os.environ.get("SLIPSTREAM_TEST_PRESSURE", "")
# What a full node gives up first, as deploy/k8s/base/priority-classes.yaml says.
FIRST_EVICTED = "drafter"
_MORE = 6
_MIB = 1 << 20


def evicted(kubectl: Kubectl) -> dict[str, str]:
    """The tier of each evicted pod by its name, the first one first.

    A service that ends in order within the second of grace makes its pod Succeeded, without a reason.
    """
    found = [pod for pod in kubectl.json("get", "pods")["items"] if pod["status"]["phase"] in ENDED]
    found.sort(key=_ended_at)
    return {
        pod["metadata"]["name"]: pod["metadata"]["labels"]["app.kubernetes.io/component"] for pod in found
    }


def _ended_at(pod: dict[str, Any]) -> str:
    states = [each["state"].get("terminated", {}) for each in pod["status"].get("containerStatuses", ())]
    return max((state.get("finishedAt") or "" for state in states), default="")


def wait_for(holds: Callable[[], object], what: str) -> None:
    """Return when it holds."""
    deadline_s = time.monotonic() + START_S
    while not holds():
        assert time.monotonic() < deadline_s, what
        time.sleep(1.0)


def clear(kubectl: Kubectl) -> None:
    """Delete what is left of evicted pods."""
    if names := list(evicted(kubectl)):
        kubectl("delete", "pod", *names)


@pytest.mark.parametrize("tier", ["decode", "prefill", "router"])
def test_an_evicted_pod_fails_no_stream_of_the_sdk(deployed: Deployed, tier: str) -> None:
    """The kubelet ends a pod whose emptyDir exceeds its limit, with a grace of a second."""
    kubectl = deployed.kubectl
    victim = kubectl.pods(tier)[0]
    volumes = kubectl.json("get", "pod", victim)["spec"]["volumes"]
    (limit,) = (each["emptyDir"]["sizeLimit"] for each in volumes if each["name"] == "tmp")
    size_bytes = ({"Mi": 1, "Gi": 1024}[limit[-2:]] * int(limit[:-2]) + 32) * _MIB
    # Allocated, not written: a slow disk takes minutes for a GiB.
    program = (
        f"import os\nos.posix_fallocate(os.open('/tmp/fill', os.O_CREAT | os.O_WRONLY), 0, {size_bytes})"
    )
    alone = [tier] if tier != "router" else []
    with doubled(kubectl, *alone), deployed.new_load() as load:
        load.wait_done(_MORE)
        kubectl("exec", victim, "--", "python", "-c", program)
        wait_for(lambda: victim in evicted(kubectl), f"{victim} is not evicted")
        kubectl.wait_rolled(WORKLOADS[tier], timeout_s=START_S)
        load.wait_done(_MORE)
        counts = load.finish()
    clear(kubectl)
    assert counts["sdk"]["failed"] == 0, counts
    if tier != "router":  # an HTTP answer ends with the router that makes it
        assert counts["http"]["failed"] == 0, counts


@pytest.mark.parametrize("tier", ["decode", "prefill"])
def test_a_budget_refuses_the_second_eviction_of_a_tier(deployed: Deployed, tier: str) -> None:
    """What `kubectl drain` asks for. It tries again until the pod that went first has a successor."""
    kubectl, budget = deployed.kubectl, ("get", "poddisruptionbudget", f"slipstream-{tier}")
    with doubled(kubectl, tier), deployed.new_load() as load:
        load.wait_done(_MORE)
        wait_for(lambda: kubectl.json(*budget)["status"]["disruptionsAllowed"] == 1, "no eviction is allowed")
        first, second = kubectl.pods(tier)
        status, _ = kubectl.evict(first)
        assert status == 201
        status, refusal = kubectl.evict(second)
        assert (status, refusal["reason"]) == (429, "TooManyRequests"), refusal
        causes = [cause["reason"] for cause in refusal["details"]["causes"]]
        assert causes == ["DisruptionBudget"], refusal
        kubectl.wait_rolled(WORKLOADS[tier], timeout_s=START_S)
        assert second in kubectl.pods(tier)
        load.wait_done(_MORE)
        counts = load.finish()
    for kind in ("sdk", "http"):
        assert counts[kind]["failed"] == 0, counts


def test_pressure_on_a_node_takes_a_drafter_first_and_fails_no_stream(deployed: Deployed) -> None:
    if not PRESSURE_COMMAND:
        pytest.skip("SLIPSTREAM_TEST_PRESSURE names no command that puts a node under memory pressure")
    kubectl = deployed.kubectl
    node = kubectl.json("get", "pod", kubectl.pods(FIRST_EVICTED)[0])["spec"]["nodeName"]
    with doubled(kubectl, "prefill", "decode"), deployed.new_load() as load:
        load.wait_done(_MORE)
        subprocess.run([*shlex.split(PRESSURE_COMMAND), "start", node], check=True, timeout=START_S)
        try:
            wait_for(lambda: evicted(kubectl), f"{node} evicts no pod")
        finally:
            subprocess.run([*shlex.split(PRESSURE_COMMAND), "stop", node], check=True, timeout=START_S)
        for workload in WORKLOADS.values():
            kubectl.wait_rolled(workload, timeout_s=START_S)
        load.wait_done(_MORE)
        counts = load.finish()
    taken = list(evicted(kubectl).values())
    clear(kubectl)
    assert taken[0] == FIRST_EVICTED, taken
    assert counts["sdk"]["failed"] == 0, counts
