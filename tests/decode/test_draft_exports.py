"""DraftExports: large pieces go into slots, and every slot comes back, whatever happens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.common.telemetry.counters import Counters
from libs.common.transport.socket import SocketTransport
from libs.worker.engine.feature_memory import FeatureMemory
from services.decode.draft_exports import DraftExports
from slipstream.v1 import common_pb2, drafter_pb2
from tests.worker.nodes import CHECKSUM, eventually

SLOT_BYTES, LEAST_BYTES = 64, 32
LARGE, SMALL = bytes(range(48)), bytes(31)
SOCKET = common_pb2.TRANSPORT_SOCKET


class Rig:
    """Exports into slots of a real transport, at a time that the test sets."""

    def __init__(self, transport: SocketTransport, *, n_slots: int, timeout_s: float = 60.0) -> None:
        self.now_s = 0.0
        self.counters = Counters()
        self.memory = FeatureMemory(transport, slot_bytes=SLOT_BYTES, checksum=CHECKSUM, n_slots=n_slots)
        self.exports = DraftExports(
            self.memory,
            transport,
            self.counters,
            least_bytes=LEAST_BYTES,
            most_pieces=2,
            timeout_s=timeout_s,
            clock=lambda: self.now_s,
        )

    def fill(self, seq_id: str, packed: bytes = LARGE, *, base_tokens: int = 5) -> drafter_pb2.ExtendContext:
        extend = drafter_pb2.ExtendContext(seq_id=seq_id)
        is_exported = self.exports.fill(extend, packed, base_tokens=base_tokens)
        assert is_exported == extend.HasField("exported") != extend.HasField("features")
        assert is_exported or extend.features == packed
        assert self.memory.held_bytes == len(self.exports) * SLOT_BYTES
        return extend

    def exported(self, seq_id: str, packed: bytes = LARGE, *, base_tokens: int = 5) -> bool:
        return self.fill(seq_id, packed, base_tokens=base_tokens).HasField("exported")


@pytest.fixture
async def transport() -> AsyncIterator[SocketTransport]:
    opened = SocketTransport()
    yield opened
    await opened.close()


@pytest.fixture
def rig(transport: SocketTransport) -> Rig:
    rig = Rig(transport, n_slots=4)
    rig.exports.opened(SOCKET)
    return rig


async def test_large_pieces_are_in_memory_until_their_answer(rig: Rig) -> None:
    extend = rig.fill("a")
    assert extend.exported.checksum == CHECKSUM.of(LARGE)
    assert not rig.exported("b", SMALL)
    rig.exports.answered("a", 4, is_unread=False)  # an earlier extend
    rig.exports.answered("b", 5, is_unread=False)
    assert len(rig.exports) == 1
    rig.exports.answered("a", 5, is_unread=False)
    assert rig.memory.held_bytes == 0
    name = "slipstream_draft_feature_bytes_total"
    counted = rig.counters.snapshot()
    ways = [counted[f'{name}{{way="{way}"}}'] for way in ("transport", "message")]
    assert ways == [len(LARGE), len(SMALL)]


async def test_a_sequence_has_one_piece_and_a_worker_a_few(rig: Rig) -> None:
    assert rig.exported("a") and not rig.exported("a", base_tokens=9)
    assert rig.exported("b") and not rig.exported("c")
    rig.exports.answered("a", 9, is_unread=False)  # the piece in the message
    assert not rig.exported("c")
    rig.exports.answered("a", 5, is_unread=False)
    assert rig.exported("c")


async def test_without_a_free_slot_features_are_in_the_message(transport: SocketTransport) -> None:
    rig = Rig(transport, n_slots=1)
    rig.exports.opened(SOCKET)
    taken = rig.memory.export(b"features of a prompt")
    assert taken is not None
    extend = drafter_pb2.ExtendContext(seq_id="a")
    assert not rig.exports.fill(extend, LARGE, base_tokens=5) and extend.features == LARGE
    rig.memory.release(taken)
    assert not rig.exported("a", bytes(SLOT_BYTES + 1))
    assert rig.exported("a")


@pytest.mark.parametrize(
    "theirs",
    [common_pb2.TRANSPORT_UNSPECIFIED, common_pb2.TRANSPORT_MOONCAKE, common_pb2.TRANSPORT_MOONCAKE_RDMA],
)
async def test_a_drafter_of_another_transport_gets_messages(
    transport: SocketTransport, theirs: common_pb2.Transport.ValueType
) -> None:
    rig = Rig(transport, n_slots=4)
    assert not rig.exported("a")  # nothing is known of the drafter
    rig.exports.opened(theirs)
    assert not rig.exported("a")
    rig.exports.opened(SOCKET)
    assert rig.exported("a")


async def test_the_end_of_the_stream_frees_all_and_the_next_drafter_begins_with_messages(rig: Rig) -> None:
    assert rig.exported("a") and rig.exported("b")
    rig.exports.close()
    assert rig.memory.held_bytes == 0
    assert not rig.exported("a")
    rig.exports.opened(SOCKET)
    assert rig.exported("a")


async def test_a_piece_that_is_never_answered_is_freed_in_time(transport: SocketTransport) -> None:
    rig = Rig(transport, n_slots=4, timeout_s=0.01)
    rig.exports.opened(SOCKET)
    assert rig.exported("a")
    await eventually(lambda: rig.memory.held_bytes == 0)
    rig.exports.answered("a", 5, is_unread=False)  # late
    assert rig.exported("a")


async def test_an_answered_piece_is_not_freed_again_by_its_timer(transport: SocketTransport) -> None:
    rig = Rig(transport, n_slots=4, timeout_s=0.05)
    rig.exports.opened(SOCKET)
    assert rig.exported("a")
    rig.exports.answered("a", 5, is_unread=False)
    rig.exports._timeout_s = 60.0
    assert rig.exported("a", base_tokens=6)
    await asyncio.sleep(0.1)  # longer than the timer of the first piece
    assert len(rig.exports) == 1


async def test_after_an_unread_piece_others_are_in_messages_for_a_while(rig: Rig) -> None:
    assert rig.exported("a")
    rig.exports.answered("a", 5, is_unread=True)
    assert rig.memory.held_bytes == 0
    rig.now_s = 29.0
    assert not rig.exported("b")
    rig.now_s = 31.0
    assert rig.exported("b")


_EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["fill", "small", "answer", "unread", "open", "close", "later"]),
        st.sampled_from("abcd"),
        st.integers(1, 3),
    ),
    max_size=60,
)


@given(_EVENTS)
def test_slots_are_held_by_unanswered_pieces_only(
    events: list[tuple[str, str, int]],
) -> None:
    async def play() -> None:
        transport = SocketTransport()
        rig = Rig(transport, n_slots=3)
        try:
            for event, seq_id, base_tokens in events:
                if event in ("fill", "small"):
                    rig.fill(seq_id, LARGE if event == "fill" else SMALL, base_tokens=base_tokens)
                elif event in ("answer", "unread"):
                    rig.exports.answered(seq_id, base_tokens, is_unread=event == "unread")
                elif event == "open":
                    rig.exports.opened(SOCKET)
                elif event == "close":
                    rig.exports.close()
                else:
                    rig.now_s += 20.0
                assert rig.memory.held_bytes == len(rig.exports) * SLOT_BYTES <= 2 * SLOT_BYTES
            rig.exports.close()
            assert rig.memory.held_bytes == 0
        finally:
            await transport.close()

    asyncio.run(play())
