"""MooncakeTransport with its real engine: peers that trickle, stall, cut and forge answers.

Also the calls and the environment variables that the engine gets.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from libs.common.transport.base import (
    ReadOp,
    TransferRefused,
    TransferTimeout,
)
from libs.common.transport.mooncake import MooncakeTransport
from libs.common.transport.mooncake_read import LANES
from libs.common.transport.multi_engine import TCP_RAILS
from libs.common.transport.registered_memory import PageAlignedMemory
from slipstream.errors import TransferError
from tests.common.transport.mooncake.mooncake_proxy import MooncakeProxy, forward
from tests.common.transport.peer import pattern
from tests.common.transport.peers import (
    MIB,
    WAIT_S,
    Peer,
    end_peer,
    read_with_retries,
    registered,
    start_peer,
    stop,
)
from tests.common.transport.recording_engine import make_device, recorded_calls, run_with_recording_engine
from tests.support.processes.process_checks import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[MooncakeTransport]:
    """One transport for all tests of this file; it must survive each of them."""
    opened = MooncakeTransport()
    yield opened
    await eventually(lambda: opened.reads_in_flight == 0)  # one that timed out ends later
    await opened.close()


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    started = start_peer("mooncake", 4 * MIB, 1)
    yield started
    assert started.process.poll() is None
    end_peer(started)


async def test_the_destination_of_a_trickling_peer_stays_quarantined_until_the_transfer_ends(
    engine: MooncakeTransport, peer: Peer
) -> None:
    async def trickle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Slow, but fast enough for the engine to see progress.
        while piece := await reader.read(16 << 10):
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.2)

    size, memory = 2 * MIB, registered(engine, 4 * MIB)
    async with MooncakeProxy(peer, trickle) as proxy:
        late = ReadOp(memory.address, peer.address, size)
        for timeout_s in (1, 2, 4, 8):  # until the time-out exceeds a slow machine's time to the first byte
            with pytest.raises(TransferTimeout) as caught:
                await engine.read(proxy.session, [late], timeout_s=timeout_s)
            if not caught.value.quiet:
                break
        assert not caught.value.quiet
        assert engine.quarantined(memory.address + size - 1, 1)
        assert not engine.quarantined(memory.address + size, size)
        with pytest.raises(TransferRefused, match="quarantined"):
            await engine.read(peer.session, [late], timeout_s=5)
        other_read = ReadOp(memory.address + size, peer.address, size)
        await read_with_retries(engine, peer.session, [other_read])  # other reads succeed
        assert memory.view(size, size) == pattern(size, 1)
        proxy.cut()
        await eventually(lambda: not engine.quarantined(memory.address, size), timeout_s=60)
        memory.view(0, size)[:] = bytes(size)
    await read_with_retries(engine, peer.session, [other_read])
    assert memory.view(0, size) == bytes(size)  # no late byte
    await read_with_retries(engine, peer.session, [late])


@pytest.mark.parametrize("then_cut", [True, False])
async def test_a_peer_that_stops_in_the_middle_of_an_answer_fails_the_read(
    engine: MooncakeTransport, peer: Peer, then_cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine._reads, "_stop_timeout_s", WAIT_S)

    async def half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readexactly(MIB // 3))
        await writer.drain()
        if not then_cut:
            await asyncio.Event().wait()

    memory = registered(engine, MIB)
    async with MooncakeProxy(peer, half) as proxy:
        with pytest.raises(TransferError) as caught:
            await engine.read(proxy.session, [ReadOp(memory.address, peer.address, MIB)], timeout_s=1)
        assert getattr(caught.value, "quiet", True)
        assert not engine.quarantined(memory.address, MIB)


@pytest.mark.parametrize("surplus", [1, 100_000])
async def test_surplus_bytes_on_the_wire_change_only_the_destination(
    engine: MooncakeTransport, peer: Peer, surplus: int
) -> None:
    async def inflated(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\xee" * surplus)
        await forward(reader, writer)

    memory = registered(engine, 3 * MIB)
    memory.view(0, 3 * MIB)[:] = b"\x55" * (3 * MIB)
    async with MooncakeProxy(peer, inflated) as proxy:
        for _ in range(2):
            try:
                op = ReadOp(memory.address + MIB, peer.address, MIB)
                await engine.read(proxy.session, [op], timeout_s=2)
            except TransferError:
                continue
            assert memory.view(MIB, MIB) != pattern(MIB, 1)  # the caller's checksum detects this
    assert memory.view(0, MIB) == b"\x55" * MIB
    assert memory.view(2 * MIB, MIB) == b"\x55" * MIB


async def test_a_peer_that_claims_more_memory_than_it_has_gives_an_error_and_no_bytes(
    engine: MooncakeTransport,
) -> None:
    small = start_peer("mooncake", MIB, 1)
    memory = registered(engine, MIB)
    try:
        async with MooncakeProxy(small, claimed=(b"1048576", b"9048576")) as proxy:
            op = ReadOp(memory.address, small.address + 4 * MIB, MIB)
            with pytest.raises(TransferError):
                await engine.read(proxy.session, [op], timeout_s=3)
    finally:
        end_peer(small)
    assert memory.view(0, MIB) == bytes(MIB)


async def test_the_number_of_open_elements_for_a_peer_is_bounded(peer: Peer) -> None:
    transport = MooncakeTransport()
    memory = registered(transport, 32 * MIB)
    counting = CountingEngine(transport._engine)
    transport._engine = counting
    try:
        ops = [ReadOp(memory.address + i * MIB, peer.address + i % 4 * MIB, MIB) for i in range(32)]
        await asyncio.gather(*(read_with_retries(transport, peer.session, [op]) for op in ops))
        await read_with_retries(transport, peer.session, ops)
        assert 1 < counting.most <= LANES
        assert not counting.open
    finally:
        transport._engine = counting.engine
        counting.engine = None
        await transport.close()


class CountingEngine:
    """Wraps the engine and counts its open elements."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.n_rails = engine.n_rails
        self.open: set[int] = set()
        self.most = 0

    def rail_of(self, element: int) -> int:
        return int(self.engine.rail_of(element))

    def batch_transfer_async_read(self, *arguments: Any) -> int:
        element = int(self.engine.batch_transfer_async_read(*arguments))
        self.open.add(element)
        self.most = max(self.most, len(self.open))
        return element

    def transfer_check_status(self, element: int) -> int:
        assert element in self.open, "polled again after its end"
        status = int(self.engine.transfer_check_status(element))
        if status in (1, -1):
            self.open.remove(element)
        return status


async def test_waiting_for_a_stalled_peer_uses_little_cpu(engine: MooncakeTransport) -> None:
    stalled = start_peer("mooncake", 4 * MIB, 1)
    memory = registered(engine, 4 * MIB)
    try:
        op = ReadOp(memory.address, stalled.address, 4 * MIB)
        await read_with_retries(engine, stalled.session, [op])
        stop(stalled)
        before, started = time.process_time(), time.monotonic()
        with pytest.raises(TransferTimeout):
            await engine.read(stalled.session, [op], timeout_s=2)
        used_s, waited_s = time.process_time() - before, time.monotonic() - started
        assert waited_s > 1
        assert used_s < waited_s / 2
    finally:
        end_peer(stalled)


def two_devices(tmp_path: Path) -> None:
    for number in (0, 1):
        make_device(tmp_path, f"mlx5_{number}", verbs=f"uverbs{number}")


@pytest.mark.parametrize(
    ("spec", "asked", "kind"),
    [
        ("mooncake", ["P2PHANDSHAKE", "tcp", ""], "mooncake"),
        ("rdma", ["P2PHANDSHAKE", "rdma", ""], "mooncake-rdma"),
        ("rdma:mlx5_0,mlx5_1", ["P2PHANDSHAKE", "rdma", "mlx5_0,mlx5_1"], "mooncake-rdma"),
    ],
)
async def test_environment_variables_are_set_before_the_engine_is_imported(
    tmp_path: Path, spec: str, asked: list[str], kind: str
) -> None:
    two_devices(tmp_path)
    done = await asyncio.to_thread(run_with_recording_engine, tmp_path, spec)
    engine, *others = recorded_calls(done)
    assert [each["asked"] for each in (engine, *others)] == [asked] * (1 if "rdma" in spec else TCP_RAILS)
    at_import = engine["at_import"]
    assert isinstance(at_import, dict)
    assert at_import["MC_TCP_PROGRESS_TIMEOUT_SEC"] == "2"
    assert at_import["MC_TCP_BIND_ADDRESS"] == "127.0.0.1"
    assert at_import == engine["seen"]
    assert done.stdout.splitlines()[-1] == kind


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("rdma:mlx5_7", "no device mlx5_7 here; there are: mlx5_0, mlx5_1"),
        ("rdma:mlx5_0,,mlx5_1", "a device name is empty"),
        ("rdma:", "a device name is empty"),
        ("tcp", "transport must be auto, mooncake, socket, rdma"),
        ("mooncake:mlx5_0", "transport must be auto, mooncake, socket, rdma"),
    ],
)
async def test_missing_devices_are_refused_before_the_engine_starts(
    tmp_path: Path, spec: str, why: str
) -> None:
    two_devices(tmp_path)
    done = await asyncio.to_thread(run_with_recording_engine, tmp_path, spec)
    assert done.returncode == 1
    assert why in done.stderr
    assert done.stdout == ""


async def test_rdma_is_refused_if_the_engine_would_fall_back_to_tcp(tmp_path: Path) -> None:
    two_devices(tmp_path)
    forced = {"MC_FORCE_TCP": "1"}
    done = await asyncio.to_thread(run_with_recording_engine, tmp_path, "rdma", environment=forced)
    assert done.returncode == 1
    assert "MC_FORCE_TCP is set" in done.stderr
    assert done.stdout == ""


async def test_mooncake_accepts_writes_into_registered_memory_only() -> None:
    """The premise of staging: who reaches the port writes there, without any credential."""
    transport, exposed, private = MooncakeTransport(), PageAlignedMemory(MIB), PageAlignedMemory(MIB)
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


@pytest.mark.parametrize(("spec", "is_refused"), [("rdma", True), ("mooncake", False)])
async def test_private_destinations_are_refused_where_the_engine_needs_registered_memory(
    tmp_path: Path, spec: str, is_refused: bool
) -> None:
    make_device(tmp_path, "mlx5_0")
    then = """
try:
    transport.add_destination(bytearray(4096))
    print("private")
except Exception as error:
    print("refused:", error)
"""
    done = await asyncio.to_thread(run_with_recording_engine, tmp_path, spec, then=then)
    assert done.returncode == 0, done.stderr
    wanted = "refused: Mooncake reads over rdma into registered memory only" if is_refused else "private"
    assert wanted in done.stdout
