"""The draft features of a handoff: as many rows as its reader needs, in bfloat16, by the KV transport."""

from __future__ import annotations

from itertools import count

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.common.worker_bounds import MAX_PROMPT_FEATURES
from libs.worker.engine.feature_memory import ExportedFeatures
from libs.worker.requests.messages import FEATURE_BYTES, parse_features
from services.prefill.feature_demand import READERS, FeatureDemand
from slipstream.v1 import common_pb2, prefill_pb2, prefill_pb2_grpc
from tests.worker.nodes import WAIT_S, Node, PrefillCall, prefill_request, prompt_tokens, running_nodes

# Of the protobuf form, whatever the prompt: four numbers, an address and a checksum.
MOST_STATE_BYTES = 48


async def handoff(
    node: Node, *, draft_rows: int, request_id: str = "r"
) -> tuple[prefill_pb2.HandoffTicket, prefill_pb2.HandoffComplete]:
    """The ticket and the end of the handoff of 50 tokens, to a reader of so many rows."""
    attempt = common_pb2.Attempt(request_id=request_id, attempt=1)
    call = PrefillCall(node, prefill_request(node, prompt_tokens(50), attempt=attempt))
    ticket = prefill_pb2.HandoffTicket.FromString((await call.opened()).ticket)
    request = prefill_pb2.WatchHandoffRequest(
        handoff_id=ticket.handoff_id, attempt=ticket.attempt, draft_rows=draft_rows
    )
    watch = prefill_pb2_grpc.PrefillServiceStub(node.channel).WatchHandoff(request, timeout=WAIT_S)
    events = [event async for event in watch]
    return ticket, events[-1].complete


async def release(node: Node, handoff_id: str) -> None:
    stub = prefill_pb2_grpc.PrefillServiceStub(node.channel)
    await stub.ReleaseHandoff(prefill_pb2.ReleaseHandoffRequest(handoff_id=handoff_id))
    await node.wait_idle()


@pytest.mark.parametrize("draft_rows", [0, 3, 512])
async def test_a_reader_gets_the_newest_rows_that_it_needs(draft_rows: int) -> None:
    async with running_nodes() as nodes:
        node, reader = await nodes.prefill(), await nodes.decode()
        ticket, complete = await handoff(node, draft_rows=draft_rows)
        state = complete.draft_features
        assert complete.HasField("draft_features") == bool(draft_rows)
        n_rows = min(draft_rows, 50)
        assert state.rows == n_rows
        assert state.ByteSize() <= MOST_STATE_BYTES
        if n_rows:
            assert state.start_position == 50 - n_rows
            n_bytes = n_rows * state.width * FEATURE_BYTES
            exported = ExportedFeatures(state.address, state.checksum)
            packed = await reader.core.features.read(ticket.transport_session, exported, n_bytes)
            assert packed is not None
            assert parse_features(packed, state.width, "features").shape == (n_rows, state.width)
            assert node.core.features.held_bytes == node.core.features.slot_bytes
        await release(node, ticket.handoff_id)


async def test_prompts_have_features_while_readers_want_some() -> None:
    async with running_nodes() as nodes:
        node, numbers = await nodes.prefill(), count()

        async def has_rows(draft_rows: int) -> bool:
            request_id = f"r-{next(numbers)}"
            ticket, complete = await handoff(node, draft_rows=draft_rows, request_id=request_id)
            await release(node, ticket.handoff_id)
            return complete.HasField("draft_features")

        assert await has_rows(3)
        for _ in range(READERS):
            assert node.core.thread.wants_features
            assert not await has_rows(0)
        assert not node.core.thread.wants_features
        await has_rows(3)  # its prompt may be computed before the reader asks
        assert await has_rows(3)


async def test_a_watch_that_is_refused_says_nothing_of_what_readers_want() -> None:
    async with running_nodes() as nodes:
        node = await nodes.prefill()
        ticket, _ = await handoff(node, draft_rows=3)
        stub = prefill_pb2_grpc.PrefillServiceStub(node.channel)
        other = common_pb2.Attempt(request_id="other", attempt=1)
        for handoff_id, attempt, code in (
            (ticket.handoff_id, other, grpc.StatusCode.FAILED_PRECONDITION),
            ("none", ticket.attempt, grpc.StatusCode.NOT_FOUND),
        ):
            request = prefill_pb2.WatchHandoffRequest(handoff_id=handoff_id, attempt=attempt)
            for _ in range(READERS):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await stub.WatchHandoff(request, timeout=WAIT_S).read()
                assert refused.value.code() is code
        assert node.core.thread.wants_features
        await release(node, ticket.handoff_id)


@given(st.lists(st.sampled_from([0, 0, 0, 3]), max_size=40))
def test_features_end_after_some_readers_in_turn_that_want_none(asked: list[int]) -> None:
    demand = FeatureDemand()
    assert demand.is_there
    for n, draft_rows in enumerate(asked, start=1):
        demand.record(draft_rows)
        newest = asked[max(n - READERS, 0) : n]
        assert demand.is_there == (any(newest) or n < READERS)


async def test_a_worker_without_room_for_features_hands_off_without_them() -> None:
    async with running_nodes() as nodes:
        node = await nodes.prefill()
        taken = [node.core.features.export(b"features") for _ in range(MAX_PROMPT_FEATURES)]
        assert all(taken) and node.core.features.export(b"features") is None
        ticket, complete = await handoff(node, draft_rows=3)
        assert not complete.HasField("draft_features") and not complete.finish_reason
        for exported in taken:
            assert exported is not None
            node.core.features.release(exported)
        await release(node, ticket.handoff_id)
