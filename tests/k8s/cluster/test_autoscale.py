"""The HPA scales every tier by our external scaler, as KEDA asks it, under a load that rises and falls."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.k8s.cluster import keda
from tests.k8s.cluster.conftest import START_S, WORKLOADS, Deployed
from tests.k8s.cluster.kubectl import Kubectl
from tests.k8s.cluster.load import Load
from tests.k8s.renders import needs_kubectl, of_kind, render
from tests.support.tls.authority import Authority

pytestmark = [pytest.mark.k8s, pytest.mark.timeout(3600)]
UP_AND_DOWN = ("router", "prefill", "decode", "drafter")
DECLARED = {"router": 2}  # of local-cpu, 1 otherwise
MOST = 2
SETTLE_S = 120  # longer than a pod starts: the HPA takes a pod back that is not ready yet
SURGE, POLLERS = 12, 8  # requests of a kind at a time, and clients that only ask routers
PAUSE_S = 3.0  # between the requests of the load that stays: a conversation without pauses keeps engines busy
# On two cores a load of SURGE exceeds each of them, and the load that stays none.
AIMS = {
    "busy_share": 0.1,
    "loop_busy_share": 0.5,
    "batch_share": 0.1,
    "step_ms": 1000,
    "missed_share": 0.9,
    "loop_delay_ms": 1000,
}
# KEDA may ask routers without a certificate. On crowded cores drafts do not pay, and an idle drafter is
# not scaled: so the test asks for drafts always.
ROUTER_FLAGS = (
    "--scaler-is-public",
    "--autoscale-aims=" + ",".join(f"{name}={value}" for name, value in AIMS.items()),
)


@pytest.fixture
def autoscaled(deployed: Deployed, tmp_path: Path) -> Iterator[Kubectl]:
    """An HPA for each tier, which gets its metric from the routers. All of it is gone afterwards."""
    kubectl = deployed.kubectl
    if kubectl("get", "apiservice", keda.API_SERVICE, "--ignore-not-found"):
        pytest.skip("the cluster has a server of external metrics already")
    server = Kubectl(needs_kubectl(), keda.NAMESPACE)
    kubectl("create", "namespace", keda.NAMESPACE)
    try:
        with _run_with(kubectl, "decode", "--drafts=on"), _run_with(kubectl, "router", *ROUTER_FLAGS):
            scaled = [dict(item) for item in of_kind(render("components/keda"), "ScaledObject")]
            files = Authority(tmp_path / "authority").issue("external-metrics", keda.HOST)
            server.apply(*keda.server_objects(deployed.image, scaled, files))
            server("wait", "--for=condition=Ready", f"pod/{keda.SERVER}", f"--timeout={START_S:.0f}s",
                   timeout_s=START_S)  # fmt: skip
            kubectl("wait", "--for=condition=Available", f"apiservice/{keda.API_SERVICE}", "--timeout=100s")
            stated = _stated(server)
            kubectl.apply(
                *(
                    keda.autoscaler_of(item, stated[item["metadata"]["name"]], most=MOST, settle_s=SETTLE_S)
                    for item in scaled
                )
            )
            yield kubectl
    finally:
        kubectl("delete", "hpa", "--all")
        kubectl("delete", "apiservice", keda.API_SERVICE, "--ignore-not-found")
        kubectl("delete", "namespace", keda.NAMESPACE, timeout_s=START_S)
        for tier in (*UP_AND_DOWN, "kvstore"):
            kubectl("scale", WORKLOADS[tier], f"--replicas={DECLARED.get(tier, 1)}")


@contextmanager
def _run_with(kubectl: Kubectl, tier: str, *extra: str) -> Iterator[None]:
    """The tier's pods with further flags; as they were afterwards."""
    path = "/spec/template/spec/containers/0/args"
    declared = kubectl.json("get", WORKLOADS[tier])["spec"]["template"]["spec"]["containers"][0]["args"]

    def roll(arguments: Sequence[str]) -> None:
        change = json.dumps([{"op": "replace", "path": path, "value": list(arguments)}])
        kubectl("patch", WORKLOADS[tier], "--type=json", f"--patch={change}")
        kubectl.wait_rolled(WORKLOADS[tier], timeout_s=START_S)

    try:
        roll([*declared, *extra])
        yield
    finally:
        roll(declared)


def _stated(server: Kubectl) -> dict[str, Any]:
    """The metric of each tier. Routers that end are asked too, and refuse until they are gone."""
    deadline_s = time.monotonic() + START_S
    while True:
        try:
            said = server("exec", keda.SERVER, "--", "python", "/script/external_metrics.py", "--specs")
            return dict(json.loads(said))
        except AssertionError:
            if time.monotonic() > deadline_s:
                raise
        time.sleep(1.0)


def _ready(kubectl: Kubectl) -> Mapping[str, int]:
    """The ready pods of each tier."""
    return {
        tier: kubectl.json("get", workload)["status"].get("readyReplicas", 0)
        for tier, workload in WORKLOADS.items()
    }


def _wait_replicas(kubectl: Kubectl, wanted: Mapping[str, int]) -> None:
    """Return when each tier has had the number once."""
    missing = dict(wanted)
    deadline_s = time.monotonic() + START_S
    while missing:
        found = _ready(kubectl)
        missing = {tier: number for tier, number in missing.items() if found[tier] != number}
        assert time.monotonic() < deadline_s, f"{missing} never came: {_states(kubectl)}"
        time.sleep(1.0)


def _states(kubectl: Kubectl) -> list[Any]:
    items = kubectl.json("get", "hpa")["items"]
    return [{item["metadata"]["name"]: item.get("status")} for item in items]


def _finish(load: Load) -> None:
    """End the load, of which nothing failed."""
    counts = load.finish()
    assert [counts[kind]["failed"] for kind in counts if kind != "ended"] == [0] * (len(counts) - 1), counts


def test_every_tier_follows_a_load_that_rises_and_falls(deployed: Deployed, autoscaled: Kubectl) -> None:
    with deployed.new_load(each=1, pause_s=PAUSE_S) as load:
        _wait_replicas(autoscaled, dict.fromkeys(UP_AND_DOWN, 1))
        with deployed.new_load(name="surge", each=SURGE, pollers=POLLERS) as surge:
            _wait_replicas(autoscaled, dict.fromkeys(UP_AND_DOWN, MOST))
            surge.wait_done(2)
            _finish(surge)
        # One conversation alone keeps the draft head of the shipped model busier than the aim.
        _wait_replicas(autoscaled, dict.fromkeys(("router", "prefill", "decode"), 1))
        load.wait_done(4)
        _finish(load)
    _wait_replicas(autoscaled, {"drafter": 1, "kvstore": 1})


def test_the_kvstore_grows_by_the_scalers_answer_and_never_shrinks(
    deployed: Deployed, autoscaled: Kubectl
) -> None:
    """Its signal, blocks that are wanted after their eviction, needs more KV than a small node has. So its
    least number of nodes rises in place of the load, and falls again."""
    with deployed.new_load(each=1, pause_s=PAUSE_S) as load:
        _wait_replicas(autoscaled, {"kvstore": 1})
        with _run_with(autoscaled, "router", f"--autoscale-limits=kvstore={MOST}:{MOST}"):
            _wait_replicas(autoscaled, {"kvstore": MOST})
        scaled_s = time.time()
        # An HPA decides every 15 s; the window of the tiers that do shrink is over as well.
        while time.time() < scaled_s + SETTLE_S + 30:
            assert _ready(autoscaled)["kvstore"] == MOST, _states(autoscaled)
            time.sleep(5.0)
        load.wait_done(2)
        _finish(load)
