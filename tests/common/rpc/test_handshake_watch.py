"""A TLS port whose handshakes fail says so; one whose callers get through says nothing."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import grpc
import pytest

from libs.common.rpc import handshake_watch
from libs.common.rpc.handshake_watch import HandshakeWatch
from libs.common.rpc.serve import ServiceHost
from libs.common.telemetry.paced_warnings import WARN_EVERY_S, PacedWarnings
from slipstream.rpc.credential_fault import credential_fault
from slipstream.rpc.dial import Dial
from slipstream.rpc.tls import TlsFiles
from tests.support.tls.authority import Authority


class Watched:
    """A watch with a clock that the test sets."""

    def __init__(self) -> None:
        self.now_s = 0.0
        warnings = PacedWarnings(logging.getLogger("watched"), clock=lambda: self.now_s)
        self.watch = HandshakeWatch(warnings, clock=lambda: self.now_s)

    def pass_a_while(self, *, handshakes: int, calls: int) -> None:
        """Handshakes and calls in one time of observation; the last handshake ends it."""
        for _ in range(handshakes - 1):
            self.watch.note_handshake()
        for _ in range(calls):
            self.watch.note_call()
        self.now_s += WARN_EVERY_S
        self.watch.note_handshake()


def test_handshakes_without_calls_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    watched.pass_a_while(handshakes=10, calls=1)
    watched.pass_a_while(handshakes=2, calls=0)  # a caller that came and went
    assert not caplog.records
    watched.pass_a_while(handshakes=10, calls=0)
    watched.pass_a_while(handshakes=10, calls=0)
    assert len(caplog.records) == 2 and "10 connections began a TLS handshake" in caplog.text


@pytest.mark.parametrize("wrong", ["caller", "server", "both"])
async def test_a_server_notices_certificates_of_another_authority(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    monkeypatch.setattr(handshake_watch, "WARN_EVERY_S", 0.5)
    ours, theirs = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    served, caller = ours.issue("worker"), theirs.issue("router")
    if wrong == "caller":
        caller = TlsFiles(ours.ca, caller.certificate, caller.key)
    if wrong == "server":
        served = TlsFiles(theirs.ca, served.certificate, served.key)
    host = ServiceHost("127.0.0.1:0", tls=served)
    await host.start(["x"])

    async def ask() -> str | None:
        async with Dial(caller)(host.endpoint) as channel:
            begin: Any = channel.unary_unary("/grpc.health.v1.Health/Check")
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await begin(b"", timeout=60)
            return credential_fault(failed.value)

    try:
        async with asyncio.timeout(120):
            while "began a TLS handshake and made no call" not in caplog.text:
                fault = await ask()
        # A refusal of our own certificate looks like a peer that went away.
        assert (fault is None) is (wrong == "caller")
        assert fault is None or "CERTIFICATE_VERIFY_FAILED" in fault
    finally:
        await host.stop(grace_s=0)


async def test_a_server_without_tls_is_named(tmp_path: Path) -> None:
    host = ServiceHost("127.0.0.1:0")
    await host.start(["x"])
    try:
        async with Dial(Authority(tmp_path).issue("router"))(host.endpoint) as channel:
            begin: Any = channel.unary_unary("/grpc.health.v1.Health/Check")
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await begin(b"", timeout=60)
        assert "it serves without TLS" in (credential_fault(failed.value) or "")
    finally:
        await host.stop(grace_s=0)
