"""Rows that decode workers export: read by a real transport, in order for each sequence, never trusted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import numpy as np
import pytest

from libs.common.checksum import KvChecksum, memory_at
from libs.common.cluster.address_book import LoopbackAddresses
from libs.common.cluster.worker_service import held
from libs.common.telemetry.counters import Counters
from libs.common.transport.base import KvTransport, TransferTimeout
from libs.common.transport.open import open_transport
from libs.common.transport.socket import SocketTransport
from libs.engine.core.fake_head import FakeHead
from libs.engine.step.device_rows import host_rows
from libs.engine.step.draft_head import HeadRows
from libs.worker.engine.feature_memory import ExportedFeatures, FeatureMemory, FeatureReader
from libs.worker.requests.messages import FEATURE_BYTES, pack_features
from slipstream.enum_names import TRANSPORTS
from slipstream.errors import InvalidArgument
from slipstream.rpc.rpc_errors import from_rpc_error
from slipstream.v1 import common_pb2, drafter_pb2
from tests.drafter.nodes import DrafterNode, running_drafter
from tests.drafter.test_service import extend, open_stream
from tests.worker.nodes import CHECKSUM, eventually, unpacked

WIDTH = 8
FAILURES = "slipstream_kv_checksum_failures_total"
UNREAD = "slipstream_draft_rows_unread_total"
PULLED = "slipstream_feature_bytes_pulled_total"


class NotingHead(FakeHead):
    """Notes the rows that it gets from streams."""

    def __init__(self) -> None:
        super().__init__(guess=lambda token: token + 1)
        self.got: list[HeadRows] = []

    def extend_batch(self, rows: Sequence[HeadRows]) -> None:
        self.got += [each for each in rows if "/" in each.seq_id]  # not those of the warm-up
        super().extend_batch(rows)


class DecodeMemory:
    """What a decode worker exports."""

    def __init__(self, transport: KvTransport, checksum: KvChecksum = CHECKSUM) -> None:
        self.transport = transport
        slot_bytes = 512 * WIDTH * FEATURE_BYTES
        self.slots = FeatureMemory(transport, slot_bytes=slot_bytes, checksum=checksum)

    def rows(self, n: int) -> np.ndarray:
        return np.arange(n * WIDTH, dtype="<f4").reshape(n, WIDTH)

    def export(self, n_rows: int) -> ExportedFeatures:
        exported = self.slots.export(pack_features(self.rows(n_rows)))
        assert exported is not None
        return exported

    def extend(self, seq_id: str, start: int, tokens: list[int]) -> drafter_pb2.ExtendContext:
        return self.located(seq_id, start, tokens, self.export(len(tokens)))

    def located(
        self, seq_id: str, start: int, tokens: list[int], exported: ExportedFeatures
    ) -> drafter_pb2.ExtendContext:
        message = extend(seq_id, start, tokens)
        message.exported.address, message.exported.checksum = exported.address, exported.checksum
        return message

    def request(self, *extends: drafter_pb2.ExtendContext, **more: Any) -> drafter_pb2.DraftRequest:
        return drafter_pb2.DraftRequest(extends=extends, transport_session=self.transport.session_id, **more)


class HeldTransport(SocketTransport):
    """Reads wait until the test lets them go; then they happen, or fail as `fails` says."""

    def __init__(self) -> None:
        super().__init__(serves=False)
        self.go = asyncio.Event()
        self.fails = False
        self.begun = self.cancelled = 0

    async def read(self, *args: Any, **options: Any) -> None:
        self.begun += 1
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.fails:
            raise TransferTimeout("the peer makes no progress")
        await super().read(*args, **options)


@contextlib.asynccontextmanager
async def decode_memory(
    kind: str = "socket", *, checksum: KvChecksum = CHECKSUM
) -> AsyncIterator[DecodeMemory]:
    transport = open_transport(kind)
    try:
        yield DecodeMemory(transport, checksum)
    finally:
        await transport.close()


async def answers(call: Any, n: int) -> dict[tuple[str, int], list[int] | None]:
    """The next `n` proposals; None for one whose rows were not read."""
    found: dict[tuple[str, int], list[int] | None] = {}
    while len(found) < n:
        for p in (await call.read()).proposals:
            assert not (p.unread and p.tokens)
            found[p.seq_id, p.base_tokens] = None if p.unread else unpacked(p.tokens)
    return found


async def nothing_left(node: DrafterNode) -> None:
    """Whatever ended: no context, no read, no slot."""
    assert node.memory is not None
    memory = node.memory
    await eventually(lambda: held(node.service.ledger()) == 0, "an empty ledger")
    await eventually(lambda: memory.held_bytes == 0, "free slots")


@pytest.mark.parametrize("kind", ["socket", "mooncake"])
async def test_exported_rows_become_the_context(kind: str) -> None:
    head = NotingHead()
    async with decode_memory(kind) as memory, running_drafter(head, transport=open_transport(kind)) as node:
        call = open_stream(node)
        greeting = await call.read()
        assert greeting.transport == TRANSPORTS.value(kind) and not greeting.proposals
        await call.write(memory.request(memory.extend("a", 4, [5, 6, 7]), extend("b", 0, [9])))
        assert await answers(call, 2) == {("a", 8): [8, 9, 10], ("b", 2): [10, 11, 12]}
        (rows,) = [rows for rows in head.got if rows.seq_id.endswith("/a")]
        assert rows.start_position == 4 and host_rows(rows.features).tolist() == memory.rows(3).tolist()
        assert node.count(PULLED) == 3 * WIDTH * FEATURE_BYTES
        assert not node.count(UNREAD)
        call.cancel()
        await nothing_left(node)


async def test_other_sequences_go_on_while_rows_are_read_and_later_rows_wait() -> None:
    held_back, head = HeldTransport(), NotingHead()
    async with decode_memory() as memory, running_drafter(head, transport=held_back) as node:
        call = open_stream(node)
        await call.read()
        await call.write(memory.request(memory.extend("a", 0, [5, 6]), extend("b", 0, [9])))
        # Else rows that follow soon may end the drafts of those before.
        assert await answers(call, 1) == {("b", 2): [10, 11, 12]}
        await call.write(drafter_pb2.DraftRequest(extends=[extend("a", 2, [7]), extend("b", 1, [20])]))
        await call.write(drafter_pb2.DraftRequest(extends=[extend("a", 3, [8])]))
        assert await answers(call, 1) == {("b", 3): [21, 22, 23]}
        assert node.service.ledger().streams == 1
        held_back.go.set()
        got = await answers(call, 3)
        assert set(got) == {("a", 3), ("a", 4), ("a", 5)} and got["a", 5] == [9, 10, 11]
        starts = [rows.start_position for rows in head.got if rows.seq_id.endswith("/a")]
        assert starts == [0, 2, 3]
        call.cancel()
        await nothing_left(node)


async def test_a_sequence_that_closes_during_its_read_leaves_nothing() -> None:
    held_back = HeldTransport()
    async with decode_memory() as memory, running_drafter(NotingHead(), transport=held_back) as node:
        call = open_stream(node)
        await call.read()
        await call.write(memory.request(memory.extend("a", 0, [5, 6])))
        await call.write(drafter_pb2.DraftRequest(closed=["a"], extends=[extend("b", 0, [1])]))
        assert set(await answers(call, 1)) == {("b", 2)}
        await call.write(drafter_pb2.DraftRequest(closed=["b"]))
        held_back.go.set()
        assert set(await answers(call, 1)) == {("a", 3)}  # so that the worker frees its slot
        await eventually(lambda: node.batcher.sequences == 0, "no context while the stream is open")
        # The same name again is another sequence.
        await call.write(memory.request(memory.extend("a", 0, [5, 6]), closed=[]))
        assert set(await answers(call, 1)) == {("a", 3)}
        assert node.batcher.sequences == 1
        call.cancel()
        await nothing_left(node)


async def test_the_end_of_a_stream_ends_its_reads() -> None:
    held_back = HeldTransport()
    async with decode_memory() as memory, running_drafter(NotingHead(), transport=held_back) as node:
        call = open_stream(node)
        await call.read()
        await call.write(memory.request(memory.extend("a", 0, [5]), memory.extend("b", 0, [5])))
        await call.write(drafter_pb2.DraftRequest(extends=[extend("a", 1, [6])], closed=["b"]))
        await eventually(lambda: held_back.begun == 2)
        call.cancel()
        await eventually(lambda: held_back.cancelled == 2, "cancelled reads")
        await nothing_left(node)
        assert not node.count(FAILURES)


async def test_a_read_that_fails_costs_the_rows_before_the_next_ones() -> None:
    held_back, head = HeldTransport(), NotingHead()
    held_back.fails = True
    async with decode_memory() as memory, running_drafter(head, transport=held_back) as node:
        call = open_stream(node)
        await call.read()
        await call.write(memory.request(memory.extend("a", 0, [5, 6])))
        await call.write(drafter_pb2.DraftRequest(extends=[extend("a", 2, [7])]))
        held_back.go.set()
        assert await answers(call, 2) == {("a", 3): None, ("a", 4): [8, 9, 10]}
        assert [rows.start_position for rows in head.got] == [2]
        assert node.count(UNREAD) == 1 and not node.count(FAILURES)
        call.cancel()
        await nothing_left(node)


@pytest.mark.parametrize("kind", ["socket", "mooncake"])
async def test_changed_bytes_are_found(kind: str) -> None:
    head = NotingHead()
    async with decode_memory(kind) as memory, running_drafter(head, transport=open_transport(kind)) as node:
        call = open_stream(node)
        await call.read()
        exported = memory.export(2)
        memory_at(exported.address + 3, 1)[0] ^= 1
        await call.write(memory.request(memory.located("a", 0, [5, 6], exported)))
        assert await answers(call, 1) == {("a", 3): None}
        assert node.count(FAILURES) == node.count(UNREAD) == 1
        assert not head.got and not node.count(PULLED)
        call.cancel()
        await nothing_left(node)


async def test_rows_of_another_cluster_and_of_nowhere_are_not_taken_in() -> None:
    async with (
        decode_memory(checksum=KvChecksum(b"another")) as memory,
        running_drafter(NotingHead(), transport=SocketTransport(serves=False)) as node,
    ):
        call = open_stream(node)
        await call.read()
        nowhere = memory.located("b", 0, [5], ExportedFeatures(64, bytes(16)))
        await call.write(memory.request(memory.extend("a", 0, [5]), nowhere))
        assert await answers(call, 2) == {("a", 2): None, ("b", 2): None}
        too_many = memory.located("c", 0, list(range(513)), memory.export(512))
        await call.write(memory.request(too_many))
        assert await answers(call, 1) == {("c", 514): None}
        call.cancel()
        await nothing_left(node)


@pytest.mark.parametrize("session", ["", "nonsense", "10.0.0.1:7100/00", "127.0.0.1:1/" + "0" * 32])
async def test_a_session_that_is_unknown_or_dead_is_not_read(session: str) -> None:
    async with (
        decode_memory() as memory,
        running_drafter(NotingHead(), transport=SocketTransport(serves=False)) as node,
    ):
        call = open_stream(node)
        await call.read()
        await call.write(
            drafter_pb2.DraftRequest(extends=[memory.extend("a", 0, [5])], transport_session=session)
        )
        assert await answers(call, 1) == {("a", 2): None}
        call.cancel()
        await nothing_left(node)


class NothingAnnounced(LoopbackAddresses):
    """The book of a cluster without this decode worker."""

    def knows_endpoint(self, endpoint: str) -> bool:
        return False


async def test_a_session_that_discovery_does_not_announce_is_not_dialled() -> None:
    counters = Counters()
    async with decode_memory() as memory:
        transport = SocketTransport(serves=False)
        slots = FeatureMemory(transport, slot_bytes=64, checksum=CHECKSUM, exports=False)
        exported, session_id = memory.export(1), memory.transport.session_id
        try:
            stranger = FeatureReader(transport, slots, NothingAnnounced(), counters)
            assert await stranger.read(session_id, exported, WIDTH * FEATURE_BYTES) is None
            member = FeatureReader(transport, slots, LoopbackAddresses(), counters)
            assert await member.read(session_id, exported, WIDTH * FEATURE_BYTES)
        finally:
            await transport.close()


async def test_a_restarted_decode_worker_is_not_read_under_its_old_session() -> None:
    async with running_drafter(NotingHead(), transport=SocketTransport(serves=False)) as node:
        call = open_stream(node)
        await call.read()
        async with decode_memory() as memory:
            await call.write(memory.request(memory.extend("a", 0, [5])))
            assert await answers(call, 1) == {("a", 2): [6, 7, 8]}
            gone = memory.request(memory.extend("b", 0, [5]))
        await call.write(gone)
        assert await answers(call, 1) == {("b", 2): None}
        call.cancel()
        await nothing_left(node)


async def test_a_drafter_without_a_transport_says_so_by_silence_and_reads_nothing() -> None:
    async with decode_memory() as memory, running_drafter(NotingHead()) as node:
        call = open_stream(node)
        await call.write(memory.request(memory.extend("a", 0, [5]), extend("b", 0, [1])))
        first = await call.read()
        assert first.transport == common_pb2.TRANSPORT_UNSPECIFIED
        unread = {p.seq_id: p.unread for p in first.proposals}
        while len(unread) < 2:
            unread |= {p.seq_id: p.unread for p in (await call.read()).proposals}
        assert unread == {"a": True, "b": False}
        call.cancel()
        await eventually(lambda: held(node.service.ledger()) == 0)


async def test_more_reads_than_a_stream_may_wait_for_are_all_answered() -> None:
    n_sequences = 40
    async with (
        decode_memory() as memory,
        running_drafter(NotingHead(), transport=SocketTransport(serves=False)) as node,
    ):
        call = open_stream(node)
        await call.read()
        await call.write(memory.request(*(memory.extend(f"s{n}", 0, [n]) for n in range(n_sequences))))
        got = await answers(call, n_sequences)
        assert got == {(f"s{n}", 2): [n + 1, n + 2, n + 3] for n in range(n_sequences)}
        call.cancel()
        await nothing_left(node)


async def test_a_malformed_checksum_ends_the_stream_by_name() -> None:
    async with (
        decode_memory() as memory,
        running_drafter(NotingHead(), transport=SocketTransport(serves=False)) as node,
    ):
        call = open_stream(node)
        await call.read()
        await call.write(memory.request(memory.located("a", 0, [5], ExportedFeatures(64, b"short"))))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        error = from_rpc_error(caught.value)
        assert isinstance(error, InvalidArgument) and error.field == "checksum"
        await nothing_left(node)
