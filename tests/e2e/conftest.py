"""Real clusters for all end-to-end tests: separate processes, real etcd.

`cluster` runs the shipped model. `fakes` runs the fake engine, which checks every byte of KV that it gets,
for tests that need many streams; `load` has three of each kind, and `expected` their answers without a fault.
`make soak` runs the fifty streams of `fifty`.
Each file has separate clusters, but for those in `requests`: disk and memory are free again at the end of
the file.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.faults.fault_load import Answer, FaultRequest, mixed_requests
from libs.common.cluster.worker_record import Role
from supervisor.configuration.plan import ClusterConfig
from tests.support.clusters.disturbance import undisturbed
from tests.support.clusters.fake_engines import fake_engine_config
from tests.support.clusters.local_cluster import LocalCluster
from tests.support.fixture_dirs import lasting_dir

# Ends a test that hangs. A loaded machine may take many times as long as an idle one.
TIMEOUT_S = 450


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = str(Path(__file__).parent) + os.sep
    for item in items:
        if str(item.path).startswith(here) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@contextlib.contextmanager
def shipped_cluster(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    """The cluster of a fixture, which runs the shipped model."""
    modules = dict.fromkeys(Role, "tests.support.clusters.altered_service")
    with (
        lasting_dir(request, "cluster") as run_dir,
        LocalCluster(
            ClusterConfig(
                run_dir=run_dir, drafters=1, drafts="on", modules=modules, allow_requested_prefill=True
            )
        ) as running,
    ):
        yield running


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    with shipped_cluster(request) as running:
        yield running


@pytest.fixture(scope="module")
def fakes(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    with (
        lasting_dir(request, "fakes") as run_dir,
        LocalCluster(fake_engine_config(run_dir, pace_s=0.0003, routers=2)) as running,
    ):
        yield running


@pytest.fixture(scope="module")
def load() -> list[FaultRequest]:
    return mixed_requests(21, tokens=24)


@pytest.fixture(scope="module")
def expected(fakes: LocalCluster, load: list[FaultRequest]) -> list[Answer]:
    return undisturbed(fakes, load)


@pytest.fixture(scope="module")
def fifty() -> list[FaultRequest]:
    return mixed_requests(50, tokens=40)


@pytest.fixture(scope="module")
def fifty_expected(fakes: LocalCluster, fifty: list[FaultRequest]) -> list[Answer]:
    return undisturbed(fakes, fifty)


@pytest.fixture(autouse=True)
def _nothing_is_held_afterwards(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check that all ledgers are empty after a test, however it ended."""
    yield
    for name in ("cluster", "fakes"):
        if name in request.fixturenames:
            request.getfixturevalue(name).assert_idle()
