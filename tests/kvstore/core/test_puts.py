"""Puts publish whole blocks or none, and leak nothing."""

from __future__ import annotations

import asyncio

import pytest

from libs.common.checksum import checksum
from libs.common.transport.base import PeerGone, Region, TransferTimeout
from libs.common.transport.registered_memory import PAGE_BYTES
from services.kvstore.core.leases import LeaseRecord
from services.kvstore.core.puts import PutReservation, PutSource
from slipstream.errors import InvalidArgument, NotFound
from tests.kvstore.store_rig import BLOCK_BYTES, DRAM, Rig, key, keys, payload


async def test_a_reservation_that_is_not_committed_ends_with_its_lease(rig: Rig) -> None:
    lease = rig.puts.reserve(keys(1, 2), BLOCK_BYTES, owner="w")
    assert lease is not None
    assert rig.puts.reserve(keys(1, 2), BLOCK_BYTES, owner="v") is None  # already reserved
    assert rig.puts.reserved_blocks == 2
    rig.now_ms = lease.expires_ms
    with pytest.raises(NotFound):
        await rig.puts.commit(lease.lease_id, "s", rig.sources([1, 2]), timeout_s=1)
    assert rig.puts.expire() == 1
    assert rig.at_rest()
    assert await rig.put([1, 2]) == [1, 2]


async def held_commit(
    rig: Rig,
) -> tuple[LeaseRecord[PutReservation], asyncio.Event, asyncio.Task[tuple[list[bytes], list[bytes]]]]:
    """A commit of blocks 1 and 2 whose pull waits: its lease, the gate, and the task."""
    lease = rig.puts.reserve(keys(1, 2), BLOCK_BYTES, owner="w")
    assert lease is not None
    rig.transport.gate = gate = asyncio.Event()
    commit = asyncio.create_task(rig.puts.commit(lease.lease_id, "s", rig.sources([1, 2]), timeout_s=60))
    await asyncio.sleep(0)
    return lease, gate, commit


async def test_a_running_commit_keeps_its_reservation_from_expiring(rig: Rig) -> None:
    lease, gate, commit = await held_commit(rig)
    rig.now_ms = lease.expires_ms + 1
    assert rig.puts.expire() == 0
    rig.puts.cancel(lease.lease_id)  # a cancel does not free the slots that a commit fills
    gate.set()
    assert (await commit)[0] == keys(1, 2)
    assert rig.store.lookup_local(keys(1, 2)) == [DRAM, DRAM]


async def test_a_commit_counts_a_block_that_a_load_published_meanwhile(rig: Rig) -> None:
    _, gate, commit = await held_commit(rig)
    slot = rig.dram.table.allocate(BLOCK_BYTES)
    assert slot is not None
    rig.dram.table.publish(key(1), slot, BLOCK_BYTES, checksum(payload(1)))
    gate.set()
    committed, refused = await commit
    assert (set(committed), refused) == (set(keys(1, 2)), [])
    assert rig.at_rest()


async def test_a_cancelled_commit_publishes_nothing_and_frees_everything(rig: Rig) -> None:
    _, _, commit = await held_commit(rig)
    commit.cancel()
    with pytest.raises(asyncio.CancelledError):
        await commit
    assert rig.store.lookup_local(keys(1)) == []
    assert rig.at_rest()


async def test_blocks_that_do_not_arrive_or_do_not_match_are_refused(rig: Rig) -> None:
    rig.transport.error = PeerGone("dead")
    assert await rig.put([1, 2]) == []
    rig.transport.error = None
    lease = rig.puts.reserve(keys(1, 2, 3), BLOCK_BYTES, owner="w")
    assert lease is not None
    one, two, three = rig.sources([1, 2, 3])
    wrong = PutSource(two.key, two.address, two.n_bytes, one.checksum)
    short = PutSource(three.key, three.address, three.n_bytes - 1, three.checksum)
    stranger = PutSource(key(77), one.address, BLOCK_BYTES, one.checksum)
    committed, refused = await rig.puts.commit(
        lease.lease_id, "s", [one, wrong, short, stranger], timeout_s=5
    )
    assert committed == keys(1)
    assert refused == keys(2, 3, 77)
    assert rig.store.lookup_local(keys(1)) == [DRAM]
    assert not rig.store.contains(key(2))
    rig.puts.cancel(lease.lease_id)
    # A repeated commit of held blocks gets the same answer.
    again = await rig.puts.commit(lease.lease_id, "s", [one], timeout_s=60)
    assert again == (keys(1), [])


@pytest.mark.parametrize("group_blocks", [2, 100])
async def test_a_chain_that_was_put_leaves_from_its_end(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, group_blocks: int
) -> None:
    """Of two chains the older one, also where its commit pulls several groups."""
    monkeypatch.setattr("services.kvstore.core.puts.GROUP_BYTES", group_blocks * BLOCK_BYTES)
    older, newer = [*range(1, 9)], [*range(11, 19)]
    for chain in (older, newer):
        rig.store.lookup_local(keys(*chain))  # a request wants it first
        assert await rig.put(chain) == chain
    assert rig.dram.table.n_free == 0
    policy = rig.dram.table.policy(2 * PAGE_BYTES)
    left = [policy.choose_victim() for _ in range(8)]
    assert left == keys(*reversed(older))


async def test_a_slot_is_freed_only_when_late_bytes_cannot_land(rig: Rig) -> None:
    lease = rig.puts.reserve(keys(1), BLOCK_BYTES, owner="w")
    assert lease is not None
    slot = lease.resource.slots[key(1)]
    rig.transport.error = TransferTimeout("stalled", quiet=False)
    rig.transport.late = Region(rig.dram.address_of(slot), 1)
    committed, _ = await rig.puts.commit(lease.lease_id, "s", rig.sources([1]), timeout_s=60)
    assert committed == []
    rig.puts.expire()
    assert rig.puts.reserved_blocks == 1
    rig.transport.error = rig.transport.late = None
    rig.puts.expire()
    assert rig.at_rest()


@pytest.mark.parametrize("block_bytes", [0, 16 * 2 * PAGE_BYTES // 8 + 1])
async def test_impossible_block_sizes_are_refused(rig: Rig, block_bytes: int) -> None:
    with pytest.raises(InvalidArgument, match="block_bytes"):
        rig.puts.reserve(keys(1), block_bytes, owner="w")
