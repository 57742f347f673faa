"""Channels to peers are made again when our certificate is replaced."""

from __future__ import annotations

from pathlib import Path

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
