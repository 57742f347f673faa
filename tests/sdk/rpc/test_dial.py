"""What a channel does with a peer that ends each connection as soon as there is one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc
import pytest

from libs.common.etcd.channel import CHANNEL_OPTIONS as ETCD_OPTIONS
from slipstream.rpc.dial import CHANNEL_OPTIONS, dial
from tests.support.network.goaway_peer import (
    ANY_STREAM,
    INTERNAL_ERROR,
    NO_ERROR,
    NO_STREAM,
    a_peer_that_leaves,
)


@pytest.mark.parametrize("options", [CHANNEL_OPTIONS, ETCD_OPTIONS], ids=["workers", "etcd"])
@pytest.mark.parametrize(
    ("last_stream", "why"), [(NO_STREAM, NO_ERROR), (ANY_STREAM, NO_ERROR), (NO_STREAM, INTERNAL_ERROR)]
)
async def test_a_call_to_a_peer_that_leaves_fails_at_once(
    options: Sequence[tuple[str, Any]], last_stream: int, why: int
) -> None:
    """Not at its deadline, with gRPC trying all the time and keeping what each attempt took."""
    async with (
        a_peer_that_leaves(last_stream, why) as endpoint,
        grpc.aio.insecure_channel(endpoint, options=options) as channel,
    ):
        call: Any = channel.unary_unary("/slipstream.Test/Call")
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await call(b"", timeout=60)
    assert failed.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("name", ["unix", "dns", "xds", "ipv4", "google-c2p", "passthrough"])
async def test_a_host_is_a_host_although_grpc_has_a_scheme_of_its_name(name: str) -> None:
    """A record in etcd names no file, no other resolver and no other port."""
    async with dial(f"{name}:7000") as channel:
        call: Any = channel.unary_unary("/slipstream.Test/Call")
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await call(b"", timeout=20)
    assert failed.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    if failed.value.code() is grpc.StatusCode.UNAVAILABLE:
        assert f"errors resolving {name}:7000" in (failed.value.details() or ""), failed.value.details()
