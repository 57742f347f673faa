"""Real clusters for all end-to-end tests: separate processes, real etcd.

`cluster` runs the shipped model. `fakes` runs the fake engine, which proves every byte of KV it is given,
for tests that need many streams; `load` and `expected` are fifty of them and their undisturbed answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.fault_load import Answer, FaultRequest, mixed_requests
from slipstream.supervisor.plan import ClusterConfig
from tests.support.disturbance import undisturbed
from tests.support.fake_engines import fake_engine_config
from tests.support.local_cluster import LocalCluster


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    run_dir: Path = tmp_path_factory.mktemp("cluster")
    with LocalCluster(ClusterConfig(run_dir=run_dir, drafts="on")) as running:
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
