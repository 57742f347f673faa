"""Channels to peers are made again when our certificate is replaced, and while a name does not resolve."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from libs.worker.pins.peers import Peers
from slipstream.rpc.dial import Dial
from slipstream.rpc.tls import TlsFiles
from tests.support.tls.authority import Authority, install


async def test_a_replaced_certificate_means_new_channels(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    files = TlsFiles(tmp_path / "ca.pem", tmp_path / "own.pem", tmp_path / "own.key")
    install(authority.issue("first"), files)
    peers = Peers(dial=Dial(files))
    try:
        first = peers.channel("127.0.0.1:1")
        assert peers.channel("127.0.0.1:1") is first
        files.key.unlink()  # between two writes nothing changes
        assert peers.channel("127.0.0.1:1") is first
        install(authority.issue("second"), files)
        second = peers.channel("127.0.0.1:1")
        assert second is not first
        assert peers.channel("127.0.0.1:1") is second
    finally:
        await peers.close()


async def test_a_name_that_does_not_resolve_is_dialled_again() -> None:
    class Known:
        def knows_endpoint(self, endpoint: str) -> bool:
            return True

    peers = Peers(addresses=Known())  # type: ignore[arg-type]
    try:
        first = peers.channel("gone.invalid:7000")
        begin: Any = first.unary_unary("/slipstream.v1.Any/Call")
        with pytest.raises(grpc.aio.AioRpcError):
            await begin(b"", timeout=60)
        async with asyncio.timeout(60):
            while first.get_state() is not grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                await asyncio.sleep(0.05)
        second = peers.channel("gone.invalid:7000")
        assert second is not first, "gRPC's own pauses for names grow to two minutes"
        assert peers.channel("gone.invalid:7000") is second
    finally:
        await peers.close()
