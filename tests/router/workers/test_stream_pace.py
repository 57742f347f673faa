"""A stream of block events takes its share of the router's time, however fast its worker sends."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from libs.common.fleet_bounds import BLOCK_EVENTS_BURST_S, BLOCK_EVENTS_SHARE
from libs.common.rpc.serve import ServiceHost
from services.router.prefix_index.index import PrefixIndex
from services.router.workers.kv_event_subscriber import KvEventSubscriber
from services.router.workers.stream_pace import StreamPace
from slipstream.rpc.dial import dial
from slipstream.v1 import kv_events_pb2, kv_events_pb2_grpc
from tests.router.conftest import eventually


@given(st.lists(st.floats(0, 0.2), min_size=1, max_size=60))
def test_no_worker_takes_more_than_its_share(costs_s: list[float]) -> None:
    pace, now_s, pause_s = StreamPace(now_s=0), 0.0, 0.0
    for cost_s in costs_s:
        now_s += pause_s + cost_s
        pause_s = pace.spent(cost_s, now_s=now_s)
    assert sum(costs_s) <= BLOCK_EVENTS_BURST_S + BLOCK_EVENTS_SHARE * (now_s + pause_s) + 1e-6


def test_a_change_for_each_step_is_never_paused() -> None:
    pace = StreamPace(now_s=0)
    assert not any(pace.spent(0.0003, now_s=step / 100) for step in range(10_000))


class Flood(kv_events_pb2_grpc.KvEventServiceServicer):
    """Sends changes as fast as they are read."""

    sent = 0

    async def WatchBlocks(self, request: Any, context: Any) -> AsyncIterator[Any]:
        yield kv_events_pb2.WatchBlocksResponse(
            incarnation="life", snapshot=kv_events_pb2.BlocksSnapshot(last=True)
        )
        for sequence in itertools.count(1):
            self.sent = sequence
            changed = kv_events_pb2.BlocksChanged(block_hashes=sequence.to_bytes(16, "little") * 2)
            yield kv_events_pb2.WatchBlocksResponse(incarnation="life", sequence=sequence, stored=changed)


async def test_a_flood_waits_at_its_worker(caplog: Any) -> None:
    host, flood = ServiceHost("127.0.0.1:0"), Flood()
    kv_events_pb2_grpc.add_KvEventServiceServicer_to_server(flood, host.server)
    await host.start([])
    async with dial(host.endpoint) as channel:
        link: Any = type("Link", (), {})()
        link.channel, link.key = channel, "decode/false/1"
        link.worker = type("Named", (), {"instance": "false"})()
        index = PrefixIndex()
        feed = KvEventSubscriber(link, index)
        await eventually(lambda: "sends block events that take over" in caplog.text)
        pauses = index.gauges()["slipstream_block_event_pauses_total"]
        assert pauses >= 1
        before, began_s = index.view(link.key).sequence, asyncio.get_running_loop().time()
        await asyncio.sleep(1)
        passed_s = asyncio.get_running_loop().time() - began_s
        assert 0 < index.view(link.key).sequence - before <= 1 + passed_s * BLOCK_EVENTS_SHARE / 200e-6
        assert index.gauges()["slipstream_block_event_pauses_total"] > pauses
        feed.stop()
        await feed.wait_stopped()
    await host.stop(grace_s=0)
