"""Choosing a transport."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.common.transport import mooncake
from libs.common.transport import open as opening
from libs.common.transport.base import PeerGone, ReadOp, TransferRefused, TransferTimeout
from libs.common.transport.incarnation_probe import IncarnationProbe, ProbeAddress, greet
from libs.common.transport.mooncake_read import split_reads
from libs.common.transport.open import open_transport
from libs.common.transport.socket import SocketTransport
from slipstream.errors import FailedPrecondition
from slipstream.rpc.hosts import is_loopback
from tests.support.network.fault_proxy import FaultProxy
from tests.support.network.late_names import LateNames
from tests.support.network.ports import own_ports
from tests.support.processes.kv_attacker import listening_ports


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost"])
async def test_auto_opens_no_port_of_mooncake_where_only_this_machine_is_served(host: str) -> None:
    transport = open_transport("auto")
    assert is_loopback(host) and transport.kind == "socket"
    await transport.close()
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "node-7", "localhost.example.org")))


async def test_auto_opens_mooncake_if_it_loads_and_sockets_otherwise(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "is_loopback", lambda host: False)
    try:
        importlib.import_module("mooncake.engine")
        expected = "mooncake"
    except ImportError:
        expected = "socket"
    with caplog.at_level(logging.INFO):
        transport = open_transport("auto")
    assert transport.kind == expected
    assert sum("KV transport" in line for line in caplog.messages) == 1
    await transport.close()


async def test_auto_falls_back_to_sockets_and_logs_the_reason_in_one_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "is_loopback", lambda host: False)
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)  # as where libibverbs is missing
    with caplog.at_level(logging.INFO):
        transport = open_transport("auto")
    assert transport.kind == "socket"
    (line,) = [line for line in caplog.messages if "KV transport" in line]
    assert "mooncake" in line
    await transport.close()
    for asked in ("mooncake", "rdma"):
        if asked == "rdma":  # devices are looked for first, as there is no engine without them
            monkeypatch.setattr(mooncake, "usable_devices", lambda asked, environment: ())
        with pytest.raises(
            FailedPrecondition, match=f"--transport {asked}: Mooncake does not load .*libibverbs1"
        ):
            open_transport(asked)


def test_an_unknown_transport_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="pigeon"):
        open_transport("pigeon")


@given(
    st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 1000), st.integers(1, 300)), max_size=8),
    st.integers(1, 100),
)
def test_splitting_reads_keeps_the_address_of_every_byte(
    spans: list[tuple[int, int, int]], max_bytes: int
) -> None:
    reads = [ReadOp(local, remote, n_bytes) for local, remote, n_bytes in spans]
    pieces = list(split_reads(reads, max_bytes))

    def copies(ops: list[ReadOp]) -> list[tuple[int, int]]:
        return [(op.local_address + i, op.remote_address + i) for op in ops for i in range(op.n_bytes)]

    assert copies(pieces) == copies(reads)
    assert all(0 < piece.n_bytes <= max_bytes for piece in pieces)


@pytest.mark.parametrize("kind", ["socket", "mooncake"])
async def test_peers_read_at_the_advertised_host_while_the_transport_listens_elsewhere(kind: str) -> None:
    if kind == "mooncake":
        pytest.importorskip("mooncake.engine", exc_type=ImportError)
    (port,) = own_ports(1)
    lender = open_transport(kind, "localhost", bind=f"0.0.0.0:{port}")
    reader = open_transport(kind)
    try:
        assert lender.session_id.startswith("localhost:") and f"{port}/" in lender.session_id
        source, destination = bytearray(b"kv" * 2048), bytearray(4096)
        there, here = lender.register(source), reader.register(destination)
        await reader.read(lender.session_id, [ReadOp(here.address, there.address, 4096)], timeout_s=60)
        assert destination == source
    finally:
        await reader.close()
        await lender.close()


@pytest.mark.parametrize("kind", ["socket", "mooncake"])
async def test_peers_read_through_the_advertised_port(kind: str) -> None:
    if kind == "mooncake":  # whose probe it is; the engines have ports that no flag changes
        pytest.importorskip("mooncake.engine", exc_type=ImportError)
    (port,) = own_ports(1)
    async with FaultProxy(f"127.0.0.1:{port}") as proxy:
        announced = f"localhost:{proxy.endpoint.rpartition(':')[2]}"
        lender = open_transport(kind, "no.such.name", bind=f"127.0.0.1:{port}", advertise=announced)
        reader = open_transport(kind)
        try:
            source, destination = bytearray(b"kv" * 2048), bytearray(4096)
            there, here = lender.register(source), reader.register(destination)
            await reader.read(lender.session_id, [ReadOp(here.address, there.address, 4096)], timeout_s=60)
            assert destination == source and proxy.accepted
        finally:
            await reader.close()
            await lender.close()


@pytest.mark.parametrize("kind", ["socket", "mooncake"])
def test_a_lender_may_start_and_a_reader_may_ask_before_the_name_resolves(kind: str, tmp_path: Path) -> None:
    if kind == "mooncake":
        pytest.importorskip("mooncake.engine", exc_type=ImportError)
    names = LateNames(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.network.late_name_reader", kind, str(tmp_path / "names")],
        env={**os.environ, **names.environment},
        capture_output=True,
        text=True,
        timeout=100,
    )
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[0] for line in lines][:1] == ["unknown"] and lines[-1][0] == "read", done.stderr
    assert lines[-1][1].startswith("lender.test:")
    assert "KV of a peer: the name lender.test does not resolve" in done.stderr


class _LateNames:
    """`socket.getaddrinfo` with a name that resolves after some questions."""

    def __init__(self, *, n_failures: int) -> None:
        self.n_asked = 0
        self._n_failures = n_failures
        self._really = socket.getaddrinfo

    def __call__(self, host: str | None, *arguments: Any, **options: Any) -> Any:
        if host != "late.test":
            return self._really(host, *arguments, **options)
        self.n_asked += 1
        if self.n_asked <= self._n_failures:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return self._really("127.0.0.1", *arguments, **options)


async def test_one_read_asks_for_a_name_until_it_resolves(monkeypatch: pytest.MonkeyPatch) -> None:
    names = _LateNames(n_failures=3)
    monkeypatch.setattr(socket, "getaddrinfo", names)
    lender, reader = SocketTransport("late.test", bind="127.0.0.1:0"), SocketTransport(progress_timeout_s=60)
    try:
        source, destination = bytearray(b"kv" * 2048), bytearray(4096)
        there, here = lender.register(source), reader.register(destination)
        await reader.read(lender.session_id, [ReadOp(here.address, there.address, 4096)], timeout_s=60)
        assert destination == source and names.n_asked == 5, "three failures, the wait's end, the dial"
    finally:
        await reader.close()
        await lender.close()


async def test_one_greeting_asks_for_a_name_until_it_resolves(monkeypatch: pytest.MonkeyPatch) -> None:
    names = _LateNames(n_failures=3)
    monkeypatch.setattr(socket, "getaddrinfo", names)
    probe = IncarnationProbe("127.0.0.1:0", note=b"7")
    try:
        address = ProbeAddress("late.test", probe.port, probe.nonce)
        assert await greet(address, timeout_s=60) == b"7" and names.n_asked > 3
        names = _LateNames(n_failures=1 << 30)
        monkeypatch.setattr(socket, "getaddrinfo", names)
        with pytest.raises(TransferTimeout, match=r"late\.test"):
            await greet(address, timeout_s=0.5)
        assert names.n_asked
    finally:
        probe.close()


@pytest.mark.parametrize("host", ["a..b", "x" * 64])
async def test_a_peer_whose_host_is_no_name_is_gone(host: str) -> None:
    reader = SocketTransport()
    here = reader.register(bytearray(8))
    try:
        with pytest.raises(PeerGone, match="no host name"):
            await reader.read(f"{host}:7/{'00' * 16}", [ReadOp(here.address, 0, 8)], timeout_s=60)
        with pytest.raises(PeerGone, match="no host name"):
            await greet(ProbeAddress(host, 7, b"nonce"))
    finally:
        await reader.close()


async def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        bind = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(TransferRefused, match=bind):
            open_transport("socket", bind=bind)


async def test_a_process_that_only_reads_opens_no_port_for_sockets() -> None:
    before = listening_ports(os.getpid())
    lender, reader = open_transport("socket"), open_transport("socket", serves=False)
    try:
        assert len(listening_ports(os.getpid())) == len(before) + 1  # the lender's
        source, destination = bytearray(b"features"), bytearray(8)
        lent, kept = lender.register(source), reader.add_destination(destination)
        await reader.read(lender.session_id, [ReadOp(kept.address, lent.address, 8)], timeout_s=60)
        assert destination == source
        with pytest.raises(TransferRefused, match="only reads"):
            reader.register(bytearray(8))
    finally:
        await asyncio.gather(lender.close(), reader.close())
