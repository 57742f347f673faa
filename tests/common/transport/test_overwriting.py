"""Whoever reaches a transport's ports can write to Mooncake's registered memory, and to nothing else."""

from __future__ import annotations

import asyncio
import os
import random
import socket
from typing import Any

import pytest

from libs.common.transport.base import ReadOp, TransferRefused
from libs.common.transport.open import open_transport
from libs.common.transport.registered_memory import PageAlignedMemory
from libs.common.transport.socket import SocketTransport
from libs.common.transport.socket_server import MAGIC, REQUEST, WELCOME
from tests.common.transport.peers import MIB, WAIT_S, registered

N_BYTES = 2 * MIB


async def test_reads_fill_private_memory_that_peers_neither_read_nor_write(kind: str) -> None:
    lender, reader, stranger = (open_transport(kind) for _ in range(3))
    source, private = registered(lender, N_BYTES), PageAlignedMemory(N_BYTES)
    registered(reader, N_BYTES)  # as a worker's staging memory
    source.buffer[:N_BYTES] = os.urandom(N_BYTES)
    landing = registered(stranger, N_BYTES)
    to_private = [ReadOp(private.address, source.address, N_BYTES)]
    with pytest.raises(TransferRefused):
        await reader.read(lender.session_id, to_private, timeout_s=WAIT_S)
    reader.add_destination(private.buffer)
    await reader.read(lender.session_id, to_private, timeout_s=WAIT_S)
    assert bytes(private.buffer[:N_BYTES]) == bytes(source.buffer[:N_BYTES])
    with pytest.raises(TransferRefused):
        await stranger.read(
            reader.session_id, [ReadOp(landing.address, private.address, 64)], timeout_s=WAIT_S
        )
    for transport in (lender, reader, stranger):
        await transport.close()


async def test_mooncake_accepts_writes_into_registered_memory_only() -> None:
    """The premise of staging: who reaches the port writes there, without any credential."""
    transport, exposed, private = open_transport("mooncake"), PageAlignedMemory(MIB), PageAlignedMemory(MIB)
    transport.register(exposed.buffer)
    transport.add_destination(private.buffer)
    from mooncake.engine import TransferEngine

    engine: Any = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    garbage = PageAlignedMemory(MIB)
    garbage.buffer[:4] = b"evil"
    assert engine.register_memory(garbage.address, MIB) == 0
    peer = transport.session_id.split("/")[0]

    def write(address: int) -> int:
        return int(engine.transfer_sync_write(peer, garbage.address, address, MIB))

    assert await asyncio.to_thread(write, exposed.address) == 0 and bytes(exposed.buffer[:4]) == b"evil"
    assert await asyncio.to_thread(write, private.address) != 0 and not any(private.buffer[:4])
    await asyncio.to_thread(lambda: garbage.buffer[:1])  # the engine's memory outlives its writes
    await transport.close()


async def test_no_bytes_on_a_socket_change_registered_memory() -> None:
    """The protocol has reads only: requests of any content, also with the token, write nothing."""
    transport = SocketTransport()
    memory = registered(transport, MIB)
    memory.buffer[:MIB] = before = os.urandom(MIB)
    address, token = transport.session_id.split("/")
    host, port = address.rsplit(":", 1)
    rng = random.Random(7)

    def attack() -> None:
        for number in range(60):
            with socket.create_connection((host, int(port)), timeout=WAIT_S) as connection:
                connection.sendall(MAGIC + bytes.fromhex(token))
                assert connection.recv(1) == WELCOME
                wanted = REQUEST.pack(memory.address + rng.randrange(MIB), rng.randrange(1, MIB))
                connection.sendall(wanted if number % 2 else wanted + rng.randbytes(4096))

    await asyncio.to_thread(attack)
    assert bytes(memory.buffer[:MIB]) == before
    await transport.close()
