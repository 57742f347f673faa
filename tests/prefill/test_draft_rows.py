"""The draft state of a handoff: as many rows as its reader needs, in half the bytes."""

from __future__ import annotations

import pytest

from slipstream.v1 import prefill_pb2, prefill_pb2_grpc
from tests.worker.nodes import WAIT_S, PrefillCall, prefill_request, prompt_tokens, running_nodes


@pytest.mark.parametrize("draft_rows", [0, 3, 512])
async def test_a_reader_gets_the_newest_rows_that_it_needs(draft_rows: int) -> None:
    async with running_nodes() as nodes:
        node = await nodes.prefill()
        call = PrefillCall(node, prefill_request(node, prompt_tokens(50)))
        ticket = prefill_pb2.HandoffTicket.FromString((await call.opened()).ticket)
        stub = prefill_pb2_grpc.PrefillServiceStub(node.channel)
        request = prefill_pb2.WatchHandoffRequest(
            handoff_id=ticket.handoff_id, attempt=ticket.attempt, draft_rows=draft_rows
        )
        events = [event async for event in stub.WatchHandoff(request, timeout=WAIT_S)]
        complete, state = events[-1].complete, events[-1].complete.draft_state
        assert complete.HasField("draft_state") == bool(draft_rows)
        n_rows = min(draft_rows, 50)
        assert len(state.features) == 2 * n_rows * state.width
        assert not n_rows or state.start_position == 50 - n_rows
        await stub.ReleaseHandoff(prefill_pb2.ReleaseHandoffRequest(handoff_id=ticket.handoff_id))
        await node.wait_idle()
