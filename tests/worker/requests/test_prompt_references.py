"""Prompts that refer to a cached prefix, sent to workers over real gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

from libs.engine.core.fake import expected_tokens
from libs.engine.step.types import SamplingParams
from libs.worker.requests.prompt_cache import PromptCache
from slipstream.block_hashes import pack_hashes
from slipstream.errors import PrefixUnknown
from slipstream.rpc.rpc_errors import from_failure
from slipstream.v1 import common_pb2
from tests.worker.nodes import (
    BLOCK_TOKENS,
    Node,
    PrefillCall,
    RouterStream,
    attempt,
    greedy,
    hashes_of,
    packed,
    prefill_request,
    prompt_tokens,
    running_nodes,
    start_request,
)

TOKENS = prompt_tokens(30)
PREFIX_BLOCKS = 5
MORE = [*TOKENS[: PREFIX_BLOCKS * BLOCK_TOKENS], *prompt_tokens(11, seed=1)]


@dataclass
class Pair:
    prefill: Node
    decode: Node
    stream: RouterStream

    async def run(self, name: str, tokens: list[int], *, by_reference: bool) -> tuple[list[int], list[int]]:
        """Return the tokens of a greedy request and those that a single engine generates."""
        of_prefill = reference_fields(self.prefill, tokens) if by_reference else {}
        of_decode = reference_fields(self.decode, tokens) if by_reference else {}
        key = attempt(name)
        call = PrefillCall(self.prefill, prefill_request(self.prefill, tokens, attempt=key, **of_prefill))
        ticket = (await call.opened()).ticket
        await self.stream.write(start_request(self.decode, tokens, attempt=key, ticket=ticket, **of_decode))
        first = (await call.first_token()).token_id
        await self.stream.last(name)
        greedily = SamplingParams(temperature=0.0)
        return [first, *self.stream.tokens(name)], expected_tokens(self.decode.engine, tokens, greedily, n=8)


def reference_fields(node: Node, tokens: list[int], *, blocks: int = PREFIX_BLOCKS) -> dict[str, Any]:
    """Return the request fields that replace the whole prompt."""
    hashes = hashes_of(node, tokens)
    return {
        "prompt": packed(tokens[blocks * BLOCK_TOKENS :]),
        "block_hashes": pack_hashes(hashes[blocks:]),
        "prefix": common_pb2.PromptReference(blocks=blocks, hash=hashes[blocks - 1]),
    }


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with running_nodes() as nodes:
        prefill, decode = await nodes.prefill(), await nodes.decode()
        for node in (prefill, decode):
            node.core.prompts = PromptCache(block_tokens=BLOCK_TOKENS, min_tokens=BLOCK_TOKENS)
        stream = RouterStream(decode)
        yield Pair(prefill, decode, stream)
        await prefill.wait_idle()
        await decode.wait_idle()
        await stream.close()


async def test_a_prompt_by_reference_gives_the_tokens_of_the_whole_prompt(pair: Pair) -> None:
    got, expected = await pair.run("whole", TOKENS, by_reference=False)
    assert got == expected
    got, expected = await pair.run("named", MORE, by_reference=True)
    assert got == expected
    for node in (pair.prefill, pair.decode):
        figures = node.core.measure()
        assert figures["slipstream_prompts_by_reference_total"] == 1
        assert figures["slipstream_prompt_prefixes_unknown_total"] == 0
        assert figures["slipstream_prompt_memory_bytes"] > 4 * len(TOKENS)


async def test_an_unknown_prefix_fails_at_once_and_a_retry_with_the_whole_prompt_succeeds(pair: Pair) -> None:
    call = PrefillCall(
        pair.prefill, prefill_request(pair.prefill, MORE, **reference_fields(pair.prefill, MORE))
    )
    assert isinstance(await call.error(), PrefixUnknown)
    assert not call.events
    await pair.stream.write(start_request(pair.decode, MORE, **reference_fields(pair.decode, MORE)))
    last = await pair.stream.last()
    assert isinstance(from_failure(last.failure), PrefixUnknown)
    assert pair.prefill.ledger == pair.decode.ledger == type(pair.decode.ledger)()
    pair.stream.deltas.clear()
    got, expected = await pair.run("r", MORE, by_reference=False)
    assert got == expected


async def test_another_tenants_prompt_is_unknown(pair: Pair) -> None:
    await pair.run("whole", TOKENS, by_reference=False)
    fields = reference_fields(pair.prefill, TOKENS) | {"salt": b"another tenant", "attempt": attempt("other")}
    call = PrefillCall(pair.prefill, prefill_request(pair.prefill, TOKENS, **fields))
    assert isinstance(await call.error(), PrefixUnknown)
    await pair.stream.write(start_request(pair.decode, TOKENS, **fields))
    assert isinstance(from_failure((await pair.stream.last("other")).failure), PrefixUnknown)


@pytest.mark.parametrize("emitted", [0, 3, 6])
async def test_a_prompt_by_reference_is_resumed_and_computed_on_the_decode_worker(
    pair: Pair, emitted: int
) -> None:
    """The request has penalties, which depend on all generated tokens and, for repetition, on the prompt."""
    penalties = {"presence_penalty": 0.7, "repetition_penalty": 1.3}
    sampling = greedy(12, **penalties)
    await pair.stream.write(start_request(pair.decode, MORE, attempt=attempt("whole"), sampling=sampling))
    await pair.stream.last("whole")
    whole = pair.stream.tokens("whole")
    again = start_request(
        pair.decode,
        MORE,
        attempt=attempt("named"),
        sampling=sampling,
        emitted=packed(whole[:emitted]),
        **reference_fields(pair.decode, MORE),
    )
    await pair.stream.write(again)
    await pair.stream.last("named")
    assert pair.stream.tokens("named") == whole[emitted:]
