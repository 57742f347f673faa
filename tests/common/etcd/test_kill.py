"""What a killed etcd had acknowledged is there when it comes back (ADR 0035)."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from libs.common.etcd.client import EtcdClient
from tests.support.processes.etcd_process import EtcdProcess

MEMBERS = 8  # at once: on an idle machine the defect does not show
ROUNDS = 400


async def killed_rounds(data_dir: Path, rounds: int, rng: random.Random) -> int:
    """Kills after which the last acknowledged write was lost: the next one then has its revision."""
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


async def test_a_kill_takes_nothing_acknowledged(tmp_path: Path) -> None:
    assert await killed_rounds(tmp_path / "etcd", 3, random.Random(0)) == 0


@pytest.mark.soak
async def test_many_kills_of_busy_members_take_nothing_acknowledged(tmp_path: Path) -> None:
    rounds = (killed_rounds(tmp_path / f"etcd-{i}", ROUNDS, random.Random(i)) for i in range(MEMBERS))
    assert await asyncio.gather(*rounds) == [0] * MEMBERS
