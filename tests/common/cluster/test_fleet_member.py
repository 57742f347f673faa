"""A process is ready once etcd has its record, and not before."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from libs.common.cluster import fleet_member
from libs.common.cluster.fleet_member import FleetMember, open_discovery
from libs.common.cluster.worker_record import Role, Worker
from libs.common.etcd.access import EtcdAccess
from libs.common.runtime.readiness import DRAINING, READY, UNANNOUNCED, ProcessHealth
from tests.support.processes.etcd_process import EtcdProcess
from tests.support.processes.process_checks import eventually

RECORD = Worker(Role.KVSTORE, "kvstore-0", "127.0.0.1:1", "run-1")


class _Host:
    """Stands for the gRPC server, whose health the membership sets."""

    endpoint = RECORD.endpoint

    def __init__(self) -> None:
        self.is_ready = False

    async def set_ready(self, ready: bool) -> None:
        self.is_ready = ready


@contextlib.asynccontextmanager
async def _member(etcd: EtcdProcess) -> AsyncIterator[tuple[FleetMember, _Host, ProcessHealth]]:
    async with contextlib.AsyncExitStack() as stack:
        discovery = await open_discovery(EtcdAccess(etcd.endpoint), stack)
        host, health = _Host(), ProcessHealth()
        server: Any = host
        yield FleetMember(server, discovery, RECORD, health), host, health


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_process_that_starts_without_etcd_is_ready_when_it_is_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leaves: bool
) -> None:
    monkeypatch.setattr(fleet_member, "_ANNOUNCE_S", 0.2)
    monkeypatch.setattr(fleet_member, "_LATE_ANNOUNCE_S", 0.2)
    etcd = EtcdProcess(tmp_path / "etcd")
    async with _member(etcd) as (member, host, health):
        await member.join()
        assert not host.is_ready and health.read() is UNANNOUNCED and not health.read().serves
        if leaves:
            await member.leave()
        with etcd:
            if leaves:
                assert not host.is_ready and health.read() is DRAINING
                return
            await eventually(lambda: health.read() is READY)
            assert host.is_ready
            await member.leave()
            assert not host.is_ready and health.read() is DRAINING


async def test_a_process_that_leaves_while_it_joins_stays_away(tmp_path: Path) -> None:
    etcd = EtcdProcess(tmp_path / "etcd")
    async with _member(etcd) as (member, host, health):
        joining = asyncio.create_task(member.join())
        await asyncio.sleep(0.05)
        await member.leave()
        await joining
        assert not host.is_ready and health.read() is DRAINING
