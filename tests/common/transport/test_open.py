"""Choosing a transport."""

from __future__ import annotations

import importlib
import logging
import socket
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.common.transport import mooncake
from libs.common.transport import open as opening
from libs.common.transport.base import ReadOp, TransferRefused
from libs.common.transport.mooncake_read import split_reads
from libs.common.transport.open import open_transport
from slipstream.errors import FailedPrecondition
from slipstream.rpc.hosts import is_loopback
from tests.support.network.ports import own_ports


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


async def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        bind = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(TransferRefused, match=bind):
            open_transport("socket", bind=bind)
