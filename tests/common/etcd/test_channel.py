"""Pings on a connection to etcd: none where no call runs, because etcd ends such a connection."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from libs.common.etcd.channel import CHANNEL_OPTIONS
from slipstream.etcd.v3 import etcd_pb2 as pb
from tests.common.etcd.conftest import WAIT_S
from tests.support.processes.etcd_process import EtcdProcess

PING_MS = 300  # so that pings beside no call show soon
QUIET_S = 3.0  # etcd ends a connection at the third such ping


async def ends_without_calls(endpoint: str, wait_s: float, **changes: int) -> bool:
    """Whether a connection with these options ends within the time after its only call."""
    options = dict(CHANNEL_OPTIONS)
    options |= {f"grpc.{name}": value for name, value in {"keepalive_time_ms": PING_MS, **changes}.items()}
    clock = asyncio.get_running_loop().time
    for _ in range(20):
        async with grpc.aio.insecure_channel(endpoint, options=list(options.items())) as channel:
            ask: Any = channel.unary_unary("/etcdserverpb.KV/Range", pb.RangeRequest.SerializeToString)
            began_s = clock()
            await ask(pb.RangeRequest(key=b"/none"), timeout=WAIT_S)
            if clock() - began_s > 2 * PING_MS / 1e3:
                continue  # etcd counts pings beside a call, too
            assert channel.get_state() is grpc.ChannelConnectivity.READY
            try:
                await asyncio.wait_for(channel.wait_for_state_change(grpc.ChannelConnectivity.READY), wait_s)
            except TimeoutError:
                return False
            return True
    raise AssertionError("each call was slower than two pings")


@pytest.mark.timeout(200)
async def test_a_connection_that_lingers_without_calls_is_not_ended_for_its_pings(
    shared_etcd: EtcdProcess,
) -> None:
    """The premise comes first: a client that pings beside no call is ended."""
    endpoint = shared_etcd.endpoint
    assert await ends_without_calls(endpoint, WAIT_S, keepalive_permit_without_calls=1)
    assert not await ends_without_calls(endpoint, QUIET_S)
