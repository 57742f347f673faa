"""The room of kvstore nodes in blocks, from the records of the fleet."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from libs.common.cluster.kvstore_room import blocks_for, kvstore_rooms
from libs.common.cluster.worker_record import Role, Worker

PAGE_BYTES = 4096


def worker(role: Role, number: int = 0, **capacity: int) -> Worker:
    return Worker(role, f"{role}-{number}", "127.0.0.1:1", "1", capacity=capacity)


@given(dram_bytes=st.integers(0, 1 << 50), block_bytes=st.integers(1, 1 << 30))
def test_the_blocks_fill_the_memory_and_no_more(dram_bytes: int, block_bytes: int) -> None:
    n = blocks_for(dram_bytes, block_bytes)
    assert n * block_bytes <= dram_bytes
    assert (n + 1) * (block_bytes + PAGE_BYTES) > dram_bytes, "each block is rounded up to pages"


def test_workers_state_the_size_of_a_block() -> None:
    fleet = [
        worker(Role.DECODE, block_bytes=100_000),
        worker(Role.PREFILL, block_bytes=100_000),
        worker(Role.KVSTORE, dram_bytes=256 << 20, disk_bytes=1 << 40),
        worker(Role.KVSTORE, 1, dram_bytes=0),
    ]
    assert kvstore_rooms(fleet) == {"kvstore-0": (256 << 20) // (25 * PAGE_BYTES), "kvstore-1": 0}


def test_without_workers_the_room_is_unknown() -> None:
    assert kvstore_rooms([worker(Role.KVSTORE, dram_bytes=1 << 30), worker(Role.ROUTER)]) == {"kvstore-0": 0}
    assert blocks_for(1 << 30, 0) == 0
