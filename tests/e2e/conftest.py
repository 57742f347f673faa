"""One real cluster for all end-to-end tests: separate processes, real etcd, the shipped model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.supervisor.plan import ClusterConfig
from tests.support.local_cluster import LocalCluster


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    run_dir: Path = tmp_path_factory.mktemp("cluster")
    with LocalCluster(ClusterConfig(run_dir=run_dir, drafts="on")) as running:
        yield running


@pytest.fixture(autouse=True)
def _nothing_is_held_afterwards(request: pytest.FixtureRequest) -> Iterator[None]:
    """After any test, however it ended, no worker holds anything."""
    yield
    if "cluster" in request.fixturenames:
        request.getfixturevalue("cluster").assert_idle()
