"""FeatureMemory: slots of features that travel by a real transport, bounded, verified and given back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from libs.common.checksum import KvChecksum, memory_at
from libs.common.transport.base import KvTransport, TransferRefused
from libs.common.transport.open import open_transport
from libs.common.transport.socket import SocketTransport
from libs.worker.engine.feature_memory import ExportedFeatures, FeatureMemory
from slipstream.errors import DataCorrupt, TransferError

KEYED = KvChecksum(b"key")
SLOT_BYTES = 4096
ROWS = bytes(range(250)) * 16


@pytest.fixture(params=["socket", "mooncake"])
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[tuple[KvTransport, KvTransport]]:
    transports = [open_transport(request.param, host="127.0.0.1") for _ in range(2)]
    try:
        yield transports[0], transports[1]
    finally:
        await asyncio.gather(*(transport.close() for transport in transports))


def memory(transport: KvTransport, *, n_slots: int = 2, checksum: KvChecksum = KEYED) -> FeatureMemory:
    return FeatureMemory(transport, slot_bytes=SLOT_BYTES, checksum=checksum, n_slots=n_slots)


async def test_a_reader_gets_the_rows_and_both_ends_give_their_slots_back(
    pair: tuple[KvTransport, KvTransport],
) -> None:
    exporter, reader = memory(pair[0]), memory(pair[1])
    exported = exporter.export(ROWS)
    assert exported is not None and exporter.held_bytes == SLOT_BYTES
    for _ in range(3):  # more often than there are slots
        assert await reader.read(pair[0].session_id, exported, len(ROWS)) == ROWS
    assert reader.held_bytes == 0
    exporter.release(exported)
    assert exporter.held_bytes == 0


async def test_a_write_into_registered_memory_is_found(pair: tuple[KvTransport, KvTransport]) -> None:
    exporter, reader = memory(pair[0]), memory(pair[1])
    exported = exporter.export(ROWS)
    assert exported is not None
    memory_at(exported.address + 7, 1)[0] ^= 1
    with pytest.raises(DataCorrupt, match="draft features") as found:
        await reader.read(pair[0].session_id, exported, len(ROWS))
    assert pair[0].session_id.partition("/")[2] not in found.value.message
    assert reader.held_bytes == 0


async def test_features_of_another_cluster_are_refused(pair: tuple[KvTransport, KvTransport]) -> None:
    exporter, reader = memory(pair[0], checksum=KvChecksum(b"another")), memory(pair[1])
    exported = exporter.export(ROWS)
    assert exported is not None
    with pytest.raises(DataCorrupt):
        await reader.read(pair[0].session_id, exported, len(ROWS))


async def test_an_address_outside_the_exporters_memory_fails_the_read(
    pair: tuple[KvTransport, KvTransport],
) -> None:
    memory(pair[0])
    reader = memory(pair[1])
    with pytest.raises(TransferError):
        await reader.read(pair[0].session_id, ExportedFeatures(64, bytes(16)), len(ROWS))
    assert reader.held_bytes == 0


async def test_no_peer_reaches_the_slots_of_a_worker_that_only_reads(
    pair: tuple[KvTransport, KvTransport],
) -> None:
    exporter = memory(pair[0])
    reader = FeatureMemory(pair[1], slot_bytes=SLOT_BYTES, checksum=KEYED, n_slots=2, exports=False)
    exported = exporter.export(ROWS)
    assert exported is not None
    assert await reader.read(pair[0].session_id, exported, len(ROWS)) == ROWS
    own = reader.export(ROWS)
    assert own is not None
    with pytest.raises(TransferError):
        await exporter.read(pair[1].session_id, own, len(ROWS))


class HeldTransport(SocketTransport):
    """Reads wait for `go`; afterwards late bytes may reach the destination while `is_late`."""

    def __init__(self) -> None:
        super().__init__(host="127.0.0.1")
        self.go = asyncio.Event()
        self.is_late = False

    async def read(self, *args: object, **options: object) -> None:
        await self.go.wait()
        raise TransferRefused("no such peer")

    def quarantined(self, address: int, n_bytes: int) -> bool:
        return self.is_late


async def test_slots_are_bounded_and_return_after_cancels_and_late_bytes() -> None:
    transport = HeldTransport()
    try:
        features = memory(transport)
        assert features.export(bytes(SLOT_BYTES + 1)) is None
        reads = [asyncio.create_task(features.read("peer", ExportedFeatures(64, b""), 8)) for _ in range(2)]
        await asyncio.sleep(0)
        assert await features.read("peer", ExportedFeatures(64, b""), 8) is None  # no slot is free
        assert features.export(b"rows") is None
        reads[0].cancel()
        transport.is_late = True
        transport.go.set()
        await asyncio.wait(reads)
        assert features.held_bytes == 2 * SLOT_BYTES
        transport.is_late = False
        assert features.held_bytes == 0
    finally:
        await transport.close()


async def test_a_worker_without_features_has_no_slots() -> None:
    transport = SocketTransport(host="127.0.0.1")
    try:
        features = FeatureMemory(transport, slot_bytes=0)
        assert features.export(b"") is None and features.export(b"rows") is None and features.held_bytes == 0
    finally:
        await transport.close()
