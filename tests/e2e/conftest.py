"""Real clusters for all end-to-end tests: separate processes, real etcd.

`cluster` runs the shipped model. `fakes` runs the fake engine, which proves every byte of KV it is given,
for tests that need many streams; `load` and `expected` are fifty of them and their undisturbed answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.fault_load import Answer, FaultRequest, mixed_requests
from libs.common.worker_record import Role
from slipstream.supervisor.plan import ClusterConfig
from tests.support.disturbance import undisturbed
from tests.support.fake_engines import fake_engine_config
from tests.support.local_cluster import LocalCluster

# Ends a test that hangs. A loaded machine may take many times as long as an idle one.
TIMEOUT_S = 450


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    run_dir: Path = tmp_path_factory.mktemp("cluster")
    modules = dict.fromkeys(Role, "tests.support.bent_service")
    with LocalCluster(ClusterConfig(run_dir=run_dir, drafts="on", modules=modules)) as running:
        yield running


@pytest.fixture(scope="session")
def fakes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    config = fake_engine_config(tmp_path_factory.mktemp("fakes"), pace_s=0.0003, routers=2)
    with LocalCluster(config) as running:
        yield running


@pytest.fixture(scope="session")
def load() -> list[FaultRequest]:
    return mixed_requests(50, tokens=64)


@pytest.fixture(scope="session")
def expected(fakes: LocalCluster, load: list[FaultRequest]) -> list[Answer]:
    return undisturbed(fakes, load)


@pytest.fixture(autouse=True)
def _nothing_is_held_afterwards(request: pytest.FixtureRequest) -> Iterator[None]:
    """After any test, however it ended, no worker holds anything."""
    yield
    for name in ("cluster", "fakes"):
        if name in request.fixturenames:
            request.getfixturevalue(name).assert_idle()
