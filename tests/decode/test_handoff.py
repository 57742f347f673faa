"""Prefill and decode together: the whole handoff over gRPC and a KV transport, without a kvstore."""

from __future__ import annotations

from libs.engine.fake import expected_tokens
from libs.engine.types import SamplingParams
from slipstream.v1 import common_pb2
from tests.worker.nodes import (
    PrefillCall,
    RouterStream,
    prefill_request,
    prompt_tokens,
    running_nodes,
    start_request,
)

GREEDY = SamplingParams(temperature=0.0)


async def test_prompt_is_pulled_and_continued() -> None:
    tokens = prompt_tokens(150)
    async with running_nodes() as nodes:
        prefill, decode = await nodes.prefill(), await nodes.decode()
        call = PrefillCall(prefill, prefill_request(prefill, tokens))
        ticket = (await call.opened()).ticket
        stream = RouterStream(decode)
        await stream.call.write(start_request(decode, tokens, ticket=ticket))
        first = await call.first_token()
        last = await stream.last()
        assert last.finish_reason == common_pb2.FINISH_REASON_LENGTH
        answer = [first.token_id, *stream.tokens()]
        assert answer == expected_tokens(prefill.engine, tokens, GREEDY, n=8)
        assert last.stats.kv_bytes_pulled == 38 * decode.core.info.page_bytes
        assert last.stats.generated_tokens == 7
        await prefill.wait_idle()
        await decode.wait_idle()
        await stream.close()
