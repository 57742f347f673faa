"""What a process without credentials reads and writes at Mooncake's ports: registered memory alone.

It speaks the engine's protocol itself, because its library would refuse such addresses before they are sent.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.common.transport.peer import pattern
from tests.common.transport.peers import MIB, Peer, end_peer, start_peer
from tests.support.processes.kv_attacker import listening_ports

pytestmark = pytest.mark.skipif(find_spec("mooncake") is None, reason="Mooncake is missing")

# The header of a transfer over TCP: size, address, operation.
HEADER = struct.Struct("<QQB7x")
READ, WRITE = 0, 1
N_BYTES = 4096
_ANSWER_S = 1.0


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    started = start_peer("mooncake", MIB, 1)
    yield started
    assert started.process.poll() is None
    end_peer(started)


def transfer(port: int, address: int, operation: int) -> bytes:
    """What a port answers to a raw transfer."""
    with socket.create_connection(("127.0.0.1", port), timeout=_ANSWER_S) as connection:
        received = b""
        with contextlib.suppress(OSError):
            connection.sendall(HEADER.pack(N_BYTES, address, operation))
            if operation == WRITE:
                connection.sendall(b"\0" * N_BYTES)
            while len(received) < N_BYTES and (piece := connection.recv(N_BYTES)):
                received += piece
        return received


def heap_address(pid: int) -> int:
    """The first address of the process's heap, which nothing registers."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return next(int(line.partition("-")[0], 16) for line in maps if line.endswith("[heap]"))


def test_only_registered_memory_is_read_and_written(peer: Peer) -> None:
    ports = [port for port, is_loopback in listening_ports(peer.process.pid).items() if not is_loopback]
    registered = {port: transfer(port, peer.address, READ) for port in ports}
    data_ports = [port for port, received in registered.items() if received]
    assert data_ports
    assert all(registered[port] == pattern(N_BYTES, 1) for port in data_ports)
    heap = heap_address(peer.process.pid)
    beyond = peer.address + MIB - N_BYTES // 2
    for port in data_ports:
        for address in (heap, beyond, 0, (1 << 64) - N_BYTES // 2):
            assert not transfer(port, address, READ)
            transfer(port, address, WRITE)
    assert peer.process.poll() is None
    assert transfer(data_ports[0], peer.address, READ) == pattern(N_BYTES, 1)
