"""A hanging disk delays a request by a small part of its time; a disk dead at start opens later."""

from __future__ import annotations

import asyncio
import errno
import logging
import selectors
import time
from pathlib import Path

import pytest

from libs.worker.restore.restore_budget import RestoreBudget
from services.kvstore.core.store import DISK_DEADLINE_S
from services.kvstore.disk.config import check_disks
from services.kvstore.disk.health import SLOW_PROBE_S, UNAVAILABLE_AFTER_LATE, DiskHealth, DiskState
from services.kvstore.service import _disk_wait_s
from slipstream.v1 import kvstore_pb2
from tests.kvstore.disk.memory_disk import MemoryDisk
from tests.kvstore.disk.test_disk_faults import Gate, Rig, key

TOKENS_PER_S = 1000.0


def disk_wait_ms(compute_ms: float) -> int:
    """Return the disk wait that a worker grants the kvstore as its only source."""
    budget = RestoreBudget(n_blocks=1, block_ms=compute_ms, clock_ms=lambda: 0.0)
    assert budget.next_source(n_after=0)
    return budget.disk_wait_ms


BLOCK_TOKENS = 64


class JumpingSelector(selectors.DefaultSelector):
    """A clock that stops while the loop has work, and jumps to the next timer when it has none."""

    def __init__(self) -> None:
        super().__init__()
        self.jumps = False
        self._at_s = 0.0

    def now_s(self) -> float:
        return self._at_s if self.jumps else time.monotonic()

    def jump(self, *, on: bool) -> None:
        self._at_s = time.monotonic()
        self.jumps = on

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if not self.jumps or timeout is None or timeout <= 0:
            return super().select(timeout)
        ready = super().select(0)
        if not ready:
            self._at_s += timeout + 1e-6
        return ready


def test_a_disk_that_hangs_for_5_s_never_costs_more_than_a_fifth_of_computing() -> None:
    clock = JumpingSelector()
    loop = asyncio.SelectorEventLoop(clock)
    loop.time = clock.now_s  # type: ignore[method-assign]

    async def run() -> None:
        rig = Rig([MemoryDisk(record=False)], clock_s=clock.now_s)
        rig.store.start()
        assert await rig.put(*range(8)) == 8
        rig.drop_memory()
        gate = rig.disks[0].before = Gate("preadv", "pwritev", "fdatasync")
        gate.open.clear()
        clock.jump(on=True)
        begun_s = loop.time()
        waits_ms: list[float] = []
        while loop.time() - begun_s < 5.0:
            chain = [key(n) for n in range(1 + len(waits_ms) % 8)]
            compute_ms = len(chain) * BLOCK_TOKENS / TOKENS_PER_S * 1e3
            asked_s = loop.time()
            limit_s = _disk_wait_s(kvstore_pb2.PinRequest(disk_wait_ms=disk_wait_ms(compute_ms)))
            pin = await rig.store.pin(chain, owner="r", requested_ms=0, disk_wait_s=limit_s)
            waits_ms.append((loop.time() - asked_s) * 1e3)
            assert pin.blocks == []
            assert waits_ms[-1] + compute_ms <= 1.2 * compute_ms
            await asyncio.sleep(0.05)
        assert rig.tiers[0].unavailable and len(waits_ms) > 50
        # After the first requests the disk is unavailable, and no request waits.
        assert 1 <= sum(wait_ms > 0 for wait_ms in waits_ms) <= 10
        clock.jump(on=False)
        gate.open.set()
        await rig.until(DiskState.OK)
        assert await rig.served(*range(8)) == list(range(8))
        await rig.close()

    try:
        loop.run_until_complete(run())
    finally:
        loop.close()


def test_the_disk_wait_is_a_part_of_the_compute_time_within_the_nodes_limit() -> None:
    for compute_ms in (70.0, 400.0, 3000.0):
        assert disk_wait_ms(compute_ms) <= 0.2 * compute_ms
    assert disk_wait_ms(0.0) > 0
    assert _disk_wait_s(kvstore_pb2.PinRequest()) == DISK_DEADLINE_S
    assert _disk_wait_s(kvstore_pb2.PinRequest(disk_wait_ms=60_000)) == DISK_DEADLINE_S
    assert _disk_wait_s(kvstore_pb2.PinRequest(disk_wait_ms=20)) == 0.02


def test_late_reads_mark_a_disk_unavailable_and_a_slow_probe_does_not_bring_it_back() -> None:
    health = DiskHealth(first_probe_s=1.0)

    def state() -> DiskState:
        return health.state

    for _ in range(UNAVAILABLE_AFTER_LATE - 1):
        health.record_late(now_s=0)
    health.record_read(failed=False, now_s=0)  # one read ended
    for _ in range(UNAVAILABLE_AFTER_LATE - 1):
        health.record_late(now_s=0)
    assert state() == DiskState.OK
    health.record_late(now_s=0)
    assert state() == DiskState.UNAVAILABLE
    health.record_probe(succeeded=True, hanging=False, now_s=1, took_s=SLOW_PROBE_S + 0.1)
    assert state() == DiskState.UNAVAILABLE
    health.record_probe(succeeded=True, hanging=False, now_s=3, took_s=SLOW_PROBE_S / 2)
    assert state() == DiskState.OK


class DyingDisk(MemoryDisk):
    """No call returns while it is dead."""

    dead = False

    def lock_directory(self, directory: Path) -> int:
        self._answer()
        return super().lock_directory(directory)

    def segments(self, directory: Path) -> list[Path]:
        self._answer()
        return super().segments(directory)

    def open(self, path: Path, *, create: bool = False) -> int:
        self._answer()
        return super().open(path, create=create)

    def _answer(self) -> None:
        if self.dead:
            raise OSError(errno.EIO, "injected")


async def test_a_disk_that_is_dead_at_start_opens_when_it_heals(
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk = DyingDisk(record=False)
    earlier = Rig([disk])
    earlier.store.start()
    assert await earlier.put(*range(8)) == 8
    await earlier.close()
    disk.dead = True
    with caplog.at_level(logging.INFO, "services.kvstore"):
        rig = Rig([disk, MemoryDisk(record=False)])
        reported: set[bytes] = set()
        rig.set.subscribe(lambda found, held: reported.add(found) if held else reported.discard(found))
        rig.store.start()
        assert rig.tiers[0].unavailable and rig.store.lookup_local([key(0)]) == []
        assert await rig.put(20, 21) == 2  # the other disk takes them
        assert rig.tiers[1].table.n_blocks == 2
        assert not any(key(n) in reported for n in range(8))
        disk.dead = False
        await rig.until(DiskState.OK, DiskState.OK)
    assert {key(n) for n in range(8)} <= reported
    assert await rig.served(*range(8)) == list(range(8))
    assert await rig.put(*range(30, 40)) == 10
    messages = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert sum("going on without it" in line for line in messages) == 1
    assert sum("is back" in line for line in messages) == 1
    await rig.close()


def test_a_disk_that_does_not_answer_is_a_warning_not_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(path: object) -> object:
        raise OSError(errno.EIO, "injected")

    monkeypatch.setattr("os.statvfs", broken)
    (warning,) = check_disks([tmp_path / "a"], 8 << 20)
    assert "does not answer now" in warning
