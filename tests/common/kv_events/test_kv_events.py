"""A watcher that applies the stream has the node's blocks, wherever its calls break off."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.common.kv_events.log import BlockEventLog, EventsExpired
from libs.common.kv_events.server import KvEventServicer, snapshot_responses
from libs.common.rpc.serve import ServiceHost
from slipstream.block_view import BlockView, EventMissed
from slipstream.rpc.dial import dial
from slipstream.v1 import kv_events_pb2, kv_events_pb2_grpc
from slipstream.v1.common_pb2 import CACHE_TIER_DRAM, CACHE_TIER_NVME

DRAM, NVME = CACHE_TIER_DRAM, CACHE_TIER_NVME


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


class Watcher:
    """A reader of the log, like a WatchBlocks call, that can break off anywhere."""

    def __init__(self) -> None:
        self.view = BlockView()
        self._pieces: list[kv_events_pb2.WatchBlocksResponse] = []
        self._at = -1  # no call is open

    def read(self, log: BlockEventLog, *, steps: int) -> None:
        """Apply the next `steps` responses, opening a call if none is open."""
        if self._at < 0:
            request = self.view.resume()
            self._at = request.after_sequence
            if request.incarnation != log.incarnation or not log.can_resume(self._at):
                snapshot = log.snapshot()
                self._at = snapshot.sequence
                self._pieces = list(snapshot_responses(log.incarnation, snapshot, piece_blocks=2))
        for _ in range(steps):
            if self._pieces:
                self.view.apply(self._pieces.pop(0))
                continue
            try:
                change = log.after(self._at)
            except EventsExpired:
                self.cut()
                return
            if change is None:
                return
            response = kv_events_pb2.WatchBlocksResponse(
                incarnation=log.incarnation, sequence=change.sequence
            )
            side = response.stored if change.stored else response.removed
            side.block_hashes, side.tier = change.hashes, change.tier  # type: ignore[assignment]
            self.view.apply(response)
            self._at = change.sequence

    def cut(self) -> None:
        self._at, self._pieces = -1, []

    def read_all(self, log: BlockEventLog) -> None:
        while not (
            self._at == log.sequence and not self._pieces and self.view.incarnation == log.incarnation
        ):
            self.read(log, steps=1)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("stored"), st.sampled_from([DRAM, NVME]), st.lists(st.integers(0, 9), max_size=4)),
        st.tuples(st.just("removed"), st.sampled_from([DRAM, NVME]), st.lists(st.integers(0, 9), max_size=4)),
        st.tuples(st.just("read"), st.integers(0, 1), st.just([1, 1])),
        st.tuples(st.just("cut"), st.integers(0, 1), st.just([])),
        st.tuples(st.just("restart"), st.just(0), st.just([])),
    ),
    max_size=60,
)


@given(steps=STEPS, max_hashes=st.integers(1, 12), max_change_blocks=st.integers(1, 4))
def test_every_watcher_ends_with_the_blocks_of_the_node(
    steps: list[tuple[str, int, list[int]]], max_hashes: int, max_change_blocks: int
) -> None:
    def new_log(number: int) -> BlockEventLog:
        return BlockEventLog(f"life-{number}", max_hashes=max_hashes, max_change_blocks=max_change_blocks)

    log, lives = new_log(0), 0
    truth: dict[int, set[bytes]] = {DRAM: set(), NVME: set()}
    watchers = [Watcher(), Watcher()]
    for what, which, numbers in steps:
        keys = [key(number) for number in numbers]
        if what == "stored":
            assert log.stored(which, keys) == bool(set(keys) - truth[which])
            truth[which].update(keys)
        elif what == "removed":
            assert log.removed(which, keys) == bool(set(keys) & truth[which])
            truth[which].difference_update(keys)
        elif what == "read":
            watchers[which].read(log, steps=len(numbers))
        elif what == "cut":
            watchers[which].cut()
        else:  # the node restarts with the blocks of its disk
            lives += 1
            log = new_log(lives)
            truth[DRAM].clear()
            log.stored(NVME, truth[NVME])
            for watcher in watchers:
                watcher.cut()
        assert log._n_hashes <= max_hashes
    for watcher in watchers:
        watcher.read_all(log)
        for tier, held in truth.items():
            assert watcher.view.held.get(tier, set()) == held
            assert log.held(tier) == held


def test_a_burst_before_a_read_is_one_change_and_a_read_change_stays_as_it_is() -> None:
    log = BlockEventLog("life")
    for number in range(100):
        log.stored(DRAM, [key(number)])
    first = log.after(0)
    assert first is not None
    assert (first.sequence, len(first.hashes)) == (1, 1600)
    log.stored(DRAM, [key(200)])
    assert log.sequence == 2
    assert log.after(0) == first


def test_a_view_refuses_a_change_after_a_gap() -> None:
    view = BlockView()
    stray = kv_events_pb2.WatchBlocksResponse(incarnation="life", sequence=1)
    stray.stored.block_hashes = key(1)
    with pytest.raises(EventMissed):  # an unknown incarnation
        view.apply(stray)
    for piece in snapshot_responses("life", BlockEventLog("life").snapshot()):
        view.apply(piece)
    view.apply(stray)
    for sequence in (1, 3, 0):
        stray.sequence = sequence
        with pytest.raises(EventMissed):
            view.apply(stray)
    assert view.held == {0: {key(1)}}


class ServedEventLog:
    """A KV event servicer on a real port."""

    def __init__(self, log: BlockEventLog) -> None:
        self.log = log
        self.events = KvEventServicer(log)
        self.host = ServiceHost("127.0.0.1:0")

    async def __aenter__(self) -> ServedEventLog:
        kv_events_pb2_grpc.add_KvEventServiceServicer_to_server(self.events, self.host.server)
        await self.host.start(["slipstream.v1.KvEventService"])
        self.channel = dial(self.host.endpoint)
        self.stub = kv_events_pb2_grpc.KvEventServiceStub(self.channel)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close()
        await self.host.stop(grace_s=0.5)

    async def no_watcher_is_left(self) -> None:
        async with asyncio.timeout(60):
            while self.events.watchers:
                await asyncio.sleep(0.01)


@pytest.fixture
async def served() -> AsyncIterator[ServedEventLog]:
    async with ServedEventLog(BlockEventLog("life", max_hashes=1000)) as opened:
        yield opened


async def drain(call: AsyncIterable[kv_events_pb2.WatchBlocksResponse], view: BlockView) -> None:
    async for response in call:
        view.apply(response)


async def follow(served: ServedEventLog, view: BlockView, *, until: int) -> None:
    """One call, from the view's position to `until`."""
    call = served.stub.WatchBlocks(view.resume(), timeout=60)
    async for response in call:
        view.apply(response)
        if view.sequence >= until and view.incarnation:
            break
    call.cancel()


async def test_a_watch_starts_with_a_snapshot_and_resumes_at_its_last_position(
    served: ServedEventLog,
) -> None:
    view = BlockView()
    await follow(served, view, until=0)  # an empty node sends an empty snapshot at once
    assert (view.incarnation, view.held) == ("life", {})
    served.events.stored(DRAM, [key(1), key(2)])
    await follow(served, view, until=1)
    watch = asyncio.create_task(follow(served, view, until=3))
    while not served.events.watchers:
        await asyncio.sleep(0.01)
    served.events.removed(DRAM, [key(1)])
    served.events.stored(NVME, [key(1)])
    await asyncio.wait_for(watch, 60)
    assert view.held == {DRAM: {key(2)}, NVME: {key(1)}}
    await served.no_watcher_is_left()


async def test_a_slow_watcher_is_aborted_and_recovers(served: ServedEventLog) -> None:
    view = BlockView()
    call = served.stub.WatchBlocks(view.resume(), timeout=60)
    view.apply(await anext(aiter(call)))
    number = 0
    async with asyncio.timeout(60):
        while served.events.watchers:  # nothing is read, so flow control stops the sender
            number += 1
            served.events.stored(DRAM, [key(i) for i in range(number * 500, (number + 1) * 500)])
            await asyncio.sleep(0)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await drain(call, view)
    assert caught.value.code() == grpc.StatusCode.ABORTED
    await follow(served, view, until=served.log.sequence)
    assert view.held[DRAM] == served.log.held(DRAM)


async def test_a_large_snapshot_is_sent_in_several_messages(served: ServedEventLog) -> None:
    served.events.stored(NVME, [key(i) for i in range(40_000)])
    view, pieces = BlockView(), 0
    async for response in served.stub.WatchBlocks(view.resume(), timeout=60):
        pieces += 1
        view.apply(response)
        if view.incarnation:
            break
    assert pieces == 3
    assert view.held[NVME] == served.log.held(NVME)
