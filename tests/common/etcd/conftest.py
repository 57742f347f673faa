from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from libs.common.etcd.client import EtcdClient
from tests.support.fixture_dirs import lasting_dir
from tests.support.processes.etcd_process import EtcdProcess

WAIT_S = 60.0  # a bound for waits that are short unless the machine is slow


@pytest.fixture(autouse=True)
def long_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give slow machines enough time for their last calls to etcd."""
    monkeypatch.setattr("libs.common.etcd.lease.REVOKE_S", WAIT_S)


@pytest.fixture(scope="package")
def shared_etcd(request: pytest.FixtureRequest) -> Iterator[EtcdProcess]:
    """One etcd for all tests that do not disturb it; each test uses separate keys."""
    with lasting_dir(request, "etcd") as directory, EtcdProcess(directory / "data") as etcd:
        yield etcd


@pytest.fixture
async def client(shared_etcd: EtcdProcess) -> AsyncIterator[EtcdClient]:
    client = EtcdClient([shared_etcd.endpoint], timeout_s=WAIT_S)
    yield client
    await client.close()
