"""KV events of a worker: computed blocks, a snapshot after a broken watch, evicted blocks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from slipstream.block_view import BlockView
from slipstream.v1 import common_pb2, kv_events_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from tests.worker.nodes import (
    BLOCK_TOKENS,
    Node,
    PrefillCall,
    attempt,
    eventually,
    hashes_of,
    prefill_request,
    prompt_tokens,
    running_nodes,
)

WORKER = common_pb2.CACHE_TIER_WORKER


@contextlib.asynccontextmanager
async def following(node: Node, view: BlockView) -> AsyncIterator[None]:
    """Keep `view` up to date with the node's events inside the context."""
    stub = kv_events_pb2_grpc.KvEventServiceStub(node.channel)

    async def follow() -> None:
        async for response in stub.WatchBlocks(view.resume()):
            view.apply(response)

    task = asyncio.create_task(follow())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def compute(node: Node, tokens: list[int], name: str) -> None:
    """Run a prompt and release its pages."""
    call = PrefillCall(node, prefill_request(node, tokens, attempt=attempt(name)))
    await call.first_token()
    abort = prefill_pb2.AbortPrefillRequest(attempt=attempt(name))
    await prefill_pb2_grpc.PrefillServiceStub(node.channel).AbortPrefill(abort)
    await node.wait_idle()


async def test_a_watcher_sees_computed_and_evicted_blocks() -> None:
    async with running_nodes() as nodes:
        node = await nodes.prefill(n_pages=16)
        view = BlockView()
        first = prompt_tokens(8 * BLOCK_TOKENS, seed=1)
        async with following(node, view):
            await compute(node, first, "r-1")
            mine = set(hashes_of(node, first))
            await eventually(lambda: view.held.get(WORKER, set()) == mine)
        # While the watch is broken, another prompt takes the pages of the first.
        second = prompt_tokens(14 * BLOCK_TOKENS, seed=2)
        await compute(node, second, "r-2")
        async with following(node, view):
            await eventually(lambda: view.held[WORKER] >= set(hashes_of(node, second)))
            assert not view.held[WORKER] >= mine
        late = BlockView()
        async with following(node, late):
            await eventually(lambda: late.held.get(WORKER) == view.held[WORKER])
