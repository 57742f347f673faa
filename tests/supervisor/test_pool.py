"""The pool's masters as processes of a cluster."""

from __future__ import annotations

import importlib.util
import json
import urllib.request
from pathlib import Path

import pytest

from libs.common.cluster.worker_record import Role
from slipstream.errors import FailedPrecondition, InvalidArgument
from supervisor.commands.drain import drain_process
from supervisor.configuration.plan import ClusterConfig, plan_services, ports_needed
from supervisor.pool import POOL_MASTER, master_binary, plan_masters, pool_ports_needed
from tests.supervisor.conftest import FakeCluster
from tests.support.clusters.supervised import supervised
from tests.support.processes.process_checks import alive, all_gone, eventually


def test_masters_are_planned_only_with_a_pool() -> None:
    alone, pooled = ClusterConfig(), ClusterConfig(pool="mooncake", pool_masters=2, kvstores=2)
    assert pool_ports_needed(alone) == 0 and plan_masters(alone, etcd="e:1", ports=[]) == []
    assert pool_ports_needed(pooled) == 4
    masters = plan_masters(pooled, etcd="e:1,f:2", ports=[21_000, 21_001, 21_002, 21_003])
    assert [master.instance for master in masters] == ["pool-master-0", "pool-master-1"]
    assert [master.endpoint for master in masters] == ["127.0.0.1:21001", "127.0.0.1:21003"]
    for master, port in zip(masters, (21_000, 21_002), strict=True):
        assert master.role == POOL_MASTER and not master.awaited
        assert master.command[0] == str(master_binary())
        expected = {
            "--rpc_address=127.0.0.1",
            f"--rpc_port={port}",
            "--metrics_host=127.0.0.1",
            "--enable_ha=true",
            "--enable_oplog=true",
            "--ha_backend_connstring=e:1;f:2",
        }
        assert expected <= set(master.command)
    services = plan_services(pooled, etcd="e:1", ports=list(range(21_004, 21_004 + ports_needed(pooled))))
    assert all(master.wave < service.wave for master in masters for service in services)
    for service in services:
        assert ("--pool" in service.command) == (service.role == Role.KVSTORE)


async def test_what_cannot_work_is_refused(fake: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidArgument, match="--pool: must be one of mooncake"):
        async with supervised(fake.but(pool="redis"), say=print):
            raise AssertionError("it started")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FailedPrecondition, match="mooncake_master"):
        plan_masters(ClusterConfig(pool="mooncake"), etcd="e:1", ports=[1, 2])


async def test_the_master_leads_and_ends_with_the_cluster(fake: FakeCluster) -> None:
    async with supervised(fake.but(pool="mooncake"), say=print) as cluster:
        record = cluster.record()
        master = record.find("pool-master-0")
        assert (master.role, master.state) == (POOL_MASTER, "ready")
        assert health(master.endpoint)["role"] == "leader"
        with pytest.raises(FailedPrecondition, match="not drained"):
            drain_process(Path(record.run_dir), "pool-master-0", timeout_s=1)
        pids = [process.pid for process in record.processes if process.pid is not None]
    await all_gone(pids)


@pytest.mark.soak
async def test_a_master_that_dies_is_started_again_and_leads(fake: FakeCluster) -> None:
    async with supervised(fake.but(pool="mooncake", pool_masters=2), say=print) as cluster:
        masters = ("pool-master-0", "pool-master-1")

        def leaders() -> list[str]:
            found = (cluster.record().find(name) for name in masters)
            return [m.instance for m in found if m.pid and health(m.endpoint).get("role") == "leader"]

        await eventually(lambda: len(leaders()) == 1, timeout_s=60)
        (leader,) = leaders()
        gone = cluster.record().find(leader).pid
        assert gone is not None
        cluster.kill(leader)
        await eventually(lambda: not alive(gone))
        await eventually(lambda: len(leaders()) == 1, timeout_s=60)
        await eventually(lambda: cluster.record().find(leader).state == "ready", timeout_s=60)


def health(endpoint: str) -> dict[str, object]:
    try:
        with urllib.request.urlopen(f"http://{endpoint}/health", timeout=60) as response:
            return dict(json.load(response))
    except OSError:
        return {}
