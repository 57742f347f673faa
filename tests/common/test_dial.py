"""What a channel does with a peer that ends each connection as soon as there is one."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from libs.common.dial import CHANNEL_OPTIONS
from libs.common.etcd.client import _OPTIONS as ETCD_OPTIONS

SETTINGS, GOAWAY = 4, 7
NO_ERROR, INTERNAL_ERROR = 0, 2
NO_STREAM, ANY_STREAM = 0, 2**31 - 1


def http2_frame(kind: int, payload: bytes = b"") -> bytes:
    """A frame of the connection itself, without flags (RFC 9113, 4.1)."""
    return len(payload).to_bytes(3, "big") + bytes([kind, 0]) + bytes(4) + payload


@asynccontextmanager
async def a_peer_that_leaves(last_stream: int, why: int) -> AsyncIterator[str]:
    """The first that it says on every connection: its settings, and that no stream beyond `last_stream` is
    looked at."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(http2_frame(SETTINGS) + http2_frame(GOAWAY, struct.pack(">II", last_stream, why)))
        while await reader.read(4096):
            pass
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


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
            await call(b"", timeout=5)
    assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
