"""Log probabilities of a prompt on the Prefill stream."""

from __future__ import annotations

import numpy as np

from slipstream.v1 import prefill_pb2, prefill_pb2_grpc
from tests.worker.nodes import PrefillCall, attempt, greedy, prefill_request, prompt_tokens, running_nodes


async def test_log_probabilities_of_the_prompt_come_before_its_first_token() -> None:
    """A cached prompt too: the fake's rows name their tokens. Each message has a bounded size."""
    tokens = prompt_tokens(700)
    async with running_nodes() as nodes:
        node = await nodes.prefill(n_pages=512)
        for name in ("r1", "r2"):
            sampling = greedy(4, prompt_logprobs=20)
            call = PrefillCall(node, prefill_request(node, tokens, sampling=sampling, attempt=attempt(name)))
            opened = await call.opened()
            ticket = prefill_pb2.HandoffTicket.FromString(opened.ticket)
            first = await call.first_token()
            pieces = [e.prompt_logprobs for e in call.events if e.HasField("prompt_logprobs")]
            assert call.events[-1].HasField("first_token")
            assert [piece.first_position for piece in pieces] == [
                sum((1, *(len(p.ranks) // 4 for p in pieces[:i]))) for i in range(len(pieces))
            ]
            ranks = np.frombuffer(b"".join(piece.ranks for piece in pieces), "<u4")
            assert ranks.tolist() == tokens[1:]
            assert max(len(piece.top_ids) + len(piece.ranks) for piece in pieces) <= 4 * 4096
            assert not first.cached
            request = prefill_pb2.ReleaseHandoffRequest(handoff_id=ticket.handoff_id)
            await prefill_pb2_grpc.PrefillServiceStub(node.channel).ReleaseHandoff(request)
        assert node.core.counters.snapshot()["slipstream_prefill_tokens_total"] == 1400
        await node.wait_idle()
