"""Component postgresql on a real Kubernetes: jobs run through it, and live requests do without it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.client import Client
from tests.k8s.cluster.conftest import (
    START_S,
    WORKLOADS,
    Deployed,
    apply_manifests,
    secret,
    write_overlay,
)
from tests.k8s.cluster.kubectl import Kubectl

pytestmark = [pytest.mark.k8s, pytest.mark.timeout(3600)]
# NAME:TAG of PostgreSQL's official image on the nodes.
POSTGRES_IMAGE = os.environ.get("SLIPSTREAM_TEST_POSTGRES_IMAGE", "")
NAME = "slipstream-postgresql"
_BODY = {"messages": [{"role": "user", "content": "Hello, where is my order 1000?"}], "max_tokens": 16}
_MORE = 4


@pytest.fixture
def database(deployed: Deployed, tmp_path: Path) -> Iterator[str]:
    """The database's workload, while the routers use it. Both are as before afterwards."""
    if not POSTGRES_IMAGE:
        pytest.skip("SLIPSTREAM_TEST_POSTGRES_IMAGE names no image of PostgreSQL that the nodes have")
    kubectl, workload = deployed.kubectl, f"statefulset/{NAME}"
    folders = [tmp_path / "without", tmp_path / "with"]
    for folder in folders:
        folder.mkdir()
    write_overlay(folders[0], deployed.images)
    write_overlay(folders[1], {**deployed.images, "postgres": POSTGRES_IMAGE}, components=["postgresql"])
    without, beside = (kubectl("kustomize", str(folder)) for folder in folders)
    try:
        kubectl.apply(secret(NAME, "password", secrets.token_hex(16).encode()))
        apply_manifests(kubectl, beside)
        for each in (workload, WORKLOADS["router"]):
            kubectl.wait_rolled(each, timeout_s=START_S)
        yield workload
    finally:
        apply_manifests(kubectl, without)
        for kind in ("statefulset", "service", "poddisruptionbudget", "networkpolicy", "secret"):
            kubectl("delete", kind, NAME, "--ignore-not-found")
        kubectl("delete", "pvc", f"data-{NAME}-0", "--ignore-not-found", timeout_s=START_S)
        kubectl.wait_rolled(WORKLOADS["router"], timeout_s=START_S)


def test_jobs_run_through_the_database_and_live_requests_do_without_it(
    deployed: Deployed, database: str
) -> None:
    kubectl = deployed.kubectl
    first = _submitted(kubectl, deployed.api_key)
    answer = _answer(kubectl, deployed.api_key, first)
    with deployed.new_load() as load:
        load.wait_done(_MORE)
        kubectl("rollout", "restart", database)
        kubectl.wait_rolled(database, timeout_s=START_S)
        second = _submitted(kubectl, deployed.api_key)
        load.wait_done(_MORE)
        counts = load.finish()
    assert [counts[kind]["failed"] for kind in ("sdk", "http")] == [0, 0], counts
    assert _answer(kubectl, deployed.api_key, second)
    assert _answer(kubectl, deployed.api_key, first) == answer


def _router(kubectl: Kubectl) -> str:
    """A router that does not end: a Service's forwarded port may lead to one from before the rollout."""
    return f"pod/{kubectl.pods('router')[-1]}"


def _submitted(kubectl: Kubectl, api_key: str) -> str:
    """The id of a stored job."""
    with kubectl.forwarded(_router(kubectl), 7000) as endpoint, Client(endpoint, api_key=api_key) as client:
        (job,) = client.jobs.submit([_BODY])
        return job.id


def _answer(kubectl: Kubectl, api_key: str, job_id: str) -> str:
    """What the job answered."""
    with kubectl.forwarded(_router(kubectl), 7000) as endpoint, Client(endpoint, api_key=api_key) as client:
        done = client.jobs.wait(job_id)
    assert done.job.state == "succeeded", done
    return str(done.answer["choices"][0]["message"]["content"])
