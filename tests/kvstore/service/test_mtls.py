"""The kvstore under mTLS."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from libs.common.transport.open import open_transport
from libs.common.transport.registered_memory import PageAlignedMemory
from slipstream.rpc.tls import TlsFiles
from slipstream.v1.common_pb2 import CacheTier
from tests.kvstore.node import BLOCK_BYTES, ROOT, Client, KvstoreProcess


async def test_mtls_serves_a_known_peer_and_refuses_others(tmp_path: Path) -> None:
    pems = ROOT / "tests" / "support" / "tls"
    tls = TlsFiles(pems / "ca.pem", pems / "peer.pem", pems / "peer.key")
    files = ("--tls-ca", str(tls.ca), "--tls-certificate", str(tls.certificate), "--tls-key", str(tls.key))
    process = KvstoreProcess(tmp_path, "socket", arguments=files)
    process.start()
    memory = PageAlignedMemory(4 * BLOCK_BYTES)
    transport = open_transport("socket")
    transport.register(memory.buffer)
    peer = Client(process.endpoint, transport, memory, tls=tls)
    stranger = Client(process.endpoint, transport, memory)
    try:
        assert await peer.put([1, 2]) == 2
        assert await peer.fetch([1, 2]) == [CacheTier.CACHE_TIER_DRAM] * 2
        with pytest.raises(grpc.aio.AioRpcError):
            await stranger.status()
    finally:
        await peer.close()
        await stranger.close()
        await transport.close()
        assert process.terminate() == 0
