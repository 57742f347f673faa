"""Component pod-costs on a real Kubernetes: its role suffices, and a scale-down obeys the costs."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.async_client import AsyncClient
from slipstream.pod_costs.kube_api import ANNOTATION
from tests.k8s.cluster.conftest import (
    START_S,
    WORKLOADS,
    Deployed,
    apply_manifests,
    doubled,
    write_overlay,
)
from tests.k8s.cluster.kubectl import Kubectl

pytestmark = [pytest.mark.k8s, pytest.mark.timeout(3600)]
NAME = "slipstream-pod-costs"
# A session's KV counts with a thirty-second part, and a cost of 2 or less is not written.
_LONG = "Where is my order 1000? " * 400
_KINDS = ("deployment", "poddisruptionbudget", "networkpolicy", "rolebinding", "role", "serviceaccount")


@pytest.fixture
def writer(deployed: Deployed, tmp_path: Path) -> Iterator[str]:
    """The writer's workload, ready: its last round listed pods and wrote what was due."""
    kubectl, workload = deployed.kubectl, f"deployment/{NAME}"
    write_overlay(tmp_path, deployed.images, components=["pod-costs"])
    try:
        apply_manifests(kubectl, kubectl("kustomize", str(tmp_path)))
        kubectl.wait_rolled(workload, timeout_s=START_S)
        yield workload
    finally:
        for kind in _KINDS:
            kubectl("delete", kind, NAME, "--ignore-not-found")


def costs(kubectl: Kubectl, tier: str) -> dict[str, int]:
    """The annotation of each running pod; a pod without one counts as 0 in Kubernetes."""
    found = {}
    for name in kubectl.pods(tier):
        annotations = kubectl.json("get", "pod", name)["metadata"].get("annotations", {})
        found[name] = int(annotations.get(ANNOTATION, 0))
    return found


async def test_a_scale_down_removes_the_pod_whose_cost_is_least(deployed: Deployed, writer: str) -> None:
    kubectl = deployed.kubectl
    with doubled(kubectl, "decode"):
        with kubectl.forwarded("service/slipstream-router", 7000) as endpoint:
            async with AsyncClient(endpoint, api_key=deployed.api_key) as client:
                await client.complete(_LONG, session="costs", max_tokens=8, timeout_s=START_S)
        deadline_s = time.monotonic() + START_S
        while len(set((found := costs(kubectl, "decode")).values())) < 2:
            assert time.monotonic() < deadline_s, found
            await asyncio.sleep(1.0)
        kubectl("scale", WORKLOADS["decode"], "--replicas=1")
        while len(left := kubectl.pods("decode")) > 1:
            assert time.monotonic() < deadline_s, left
            await asyncio.sleep(0.5)
        assert left == [max(found, key=found.__getitem__)], found
    lines = [json.loads(line) for line in kubectl("logs", writer).splitlines()]
    assert {line["service"] for line in lines} == {"pod-costs"}
    assert any(left[0] in line["message"] for line in lines), lines
