"""The watch of a disk reports each change of its state."""

from __future__ import annotations

import asyncio

from services.kvstore.disk.health import DiskHealth, DiskState
from services.kvstore.disk.watch import DiskWatch


class ReclaimingDisk:
    """A healthy disk with something to reclaim, whose write fails while the probe runs."""

    busy = False

    def __init__(self) -> None:
        self.can_reclaim = True
        self.states: list[DiskState] = []
        self.is_probed = asyncio.Event()
        self.watch = DiskWatch("disk", DiskHealth(), self, clock_s=asyncio.get_running_loop().time)

    def running_since_s(self) -> tuple[float | None, float | None]:
        return None, None

    def cancel_waiting(self) -> None:
        raise AssertionError("reads go on")

    def state_changed(self) -> None:
        self.states.append(self.watch.health.state)

    async def probe(self) -> None:
        self.watch.record_error("write", OSError("a bad sector"))
        self.can_reclaim = False
        self.is_probed.set()


async def test_a_disk_that_fails_while_a_probe_succeeds_is_reported_as_back() -> None:
    disk = ReclaimingDisk()
    disk.watch.schedule_tick()
    async with asyncio.timeout(60):
        await disk.is_probed.wait()
    await asyncio.sleep(0)
    assert disk.states == [DiskState.READ_ONLY, DiskState.OK]
    disk.watch.close()
