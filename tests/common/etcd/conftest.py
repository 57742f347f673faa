from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from libs.common.etcd.client import EtcdClient
from tests.support.etcd_process import EtcdProcess


@pytest.fixture(scope="package")
def shared_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdProcess]:
    """One etcd for the tests that do not harm it; each uses keys of its own."""
    with EtcdProcess(tmp_path_factory.mktemp("etcd") / "data") as etcd:
        yield etcd


@pytest.fixture
async def client(shared_etcd: EtcdProcess) -> AsyncIterator[EtcdClient]:
    client = EtcdClient([shared_etcd.endpoint])
    yield client
    await client.close()
