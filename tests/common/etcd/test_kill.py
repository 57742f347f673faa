"""Writes that a killed etcd acknowledged exist after its restart (ADR 0001)."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from libs.common.etcd.client import EtcdClient
from tests.support.processes.etcd_process import EtcdProcess

MEMBERS = 8  # run concurrently: an idle machine does not show the defect
ROUNDS = 400


async def lost_writes_after_kills(data_dir: Path, rounds: int, rng: random.Random) -> int:
    """Count kills that lost the last acknowledged write: the next write then repeats its revision."""
    lost = 0
    with EtcdProcess(data_dir) as etcd:
        client = EtcdClient([etcd.endpoint], timeout_s=100)
        for _ in range(rounds):
            revision = 0
            for _ in range(rng.randint(1, 4)):
                revision = await client.put("/a", rng.randbytes(8))
                await asyncio.sleep(rng.choice([0.0, rng.random() * 0.1]))
            await asyncio.to_thread(etcd.kill)
            await asyncio.to_thread(etcd.start)
            lost += await client.put("/a", b"after") != revision + 1
        await client.close()
    return lost


async def test_a_killed_etcd_keeps_acknowledged_writes(tmp_path: Path) -> None:
    assert await lost_writes_after_kills(tmp_path / "etcd", 3, random.Random(0)) == 0


@pytest.mark.soak
async def test_busy_members_keep_acknowledged_writes_over_many_kills(tmp_path: Path) -> None:
    rounds = (
        lost_writes_after_kills(tmp_path / f"etcd-{i}", ROUNDS, random.Random(i)) for i in range(MEMBERS)
    )
    assert await asyncio.gather(*rounds) == [0] * MEMBERS
