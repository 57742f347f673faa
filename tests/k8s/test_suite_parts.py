"""The parts of the suite for real clusters that need none: its load, and its overlay."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.access.keyed_cluster import keyed_cluster
from tests.k8s.cluster.conftest import write_overlay
from tests.k8s.pod_container import stored_name
from tests.k8s.renders import ROOT, TIERS, needs_kubectl, pods, render

WAIT_S = 120.0
_CLIENT = ROOT / "tests" / "k8s" / "cluster" / "load_client.py"


def run_load(grpc: str, http: str, key: str, *, least: int) -> dict[str, Any]:
    """The last counts of a load that is stopped after `least` requests of each kind."""
    host, _, port = grpc.rpartition(":")
    command = [sys.executable, str(_CLIENT), host, port, http.rpartition(":")[2]]
    environment = {**os.environ, "API_KEY": key, "PYTHONPATH": str(ROOT)}
    counts: dict[str, Any] = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            deadline_s = time.monotonic() + WAIT_S
            for line in process.stdout:
                counts = json.loads(line)
                both = [counts[kind]["done"] + counts[kind]["failed"] for kind in ("sdk", "http")]
                if min(both) >= least:
                    process.send_signal(signal.SIGTERM)
                assert time.monotonic() < deadline_s, counts
                if counts["ended"]:
                    break
        finally:
            process.kill()
    return counts


def test_the_load_counts_answers_and_failures(tmp_path: Path) -> None:
    with keyed_cluster(tmp_path) as keyed:
        ends = keyed.cluster.grpc, keyed.cluster.http
        counts = run_load(*ends, keyed.key, least=2)
        assert counts["ended"] and counts["sdk"]["failed"] == counts["http"]["failed"] == 0, counts
        assert min(counts["sdk"]["done"], counts["http"]["done"]) >= 2
        refused = run_load(*ends, "no key of this cluster", least=1)
        assert refused["sdk"]["done"] == refused["http"]["done"] == 0
        assert refused["sdk"]["failed"] and "401" in refused["http"]["errors"][0]


@pytest.mark.parametrize(
    ("image", "stored"),
    [
        ("slipstream-router:dev", "localhost/slipstream-router:dev"),
        ("team/slipstream-router:dev", "localhost/team/slipstream-router:dev"),
        ("localhost/slipstream-router:dev", "localhost/slipstream-router:dev"),
        ("registry.test/slipstream-router:7", "registry.test/slipstream-router:7"),
        ("node:5000/of/slipstream-router:7", "node:5000/of/slipstream-router:7"),
    ],
)
def test_an_image_of_a_registry_keeps_its_name(image: str, stored: str) -> None:
    assert stored_name(image) == stored


def test_the_overlay_of_the_suite_names_the_images_of_the_nodes(tmp_path: Path) -> None:
    images = {tier: f"registry.test:5000/of/slipstream-{tier}:7" for tier in TIERS}
    write_overlay(tmp_path, {**images, "etcd": "registry.test:5000/etcd:v9"})
    done = subprocess.run([needs_kubectl(), "kustomize", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for pod in pods(render("overlays/local-cpu")):
        assert (images | {"etcd": "registry.test:5000/etcd:v9"})[pod.tier] in done.stdout
    assert ":dev" not in done.stdout
