"""What prefill and decode keep of ended requests."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from contextlib import contextmanager

from services.decode.sequence import DecodeSequence
from services.prefill.job import PrefillJob
from slipstream.v1 import prefill_pb2
from tests.worker.nodes import (
    PrefillCall,
    RouterStream,
    attempt,
    eventually,
    prefill_request,
    prompt_tokens,
    running_nodes,
    start_request,
)


@contextmanager
def without_collections() -> Iterator[None]:
    """No garbage collection within, so that an object in a cycle stays."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def kept_of_requests() -> list[str]:
    """The types of this process's objects that belong to one request each."""
    types = (PrefillJob, DecodeSequence, prefill_pb2.WatchHandoffResponse, prefill_pb2.HandoffComplete)
    return [type(kept).__name__ for kept in gc.get_objects() if isinstance(kept, types)]


async def test_an_ended_request_is_freed_without_a_garbage_collection() -> None:
    tokens = prompt_tokens(150)
    async with running_nodes() as nodes:
        prefill, decode = await nodes.prefill(), await nodes.decode()
        stream = RouterStream(decode)
        with without_collections():
            for name in ("one", "two"):
                call = PrefillCall(prefill, prefill_request(prefill, tokens, attempt=attempt(name)))
                ticket = (await call.opened()).ticket
                start = start_request(decode, tokens, ticket=ticket, attempt=attempt(name))
                await stream.write(start)
                await call.first_token()
                await stream.last(name)
            await asyncio.gather(prefill.wait_idle(), decode.wait_idle())
            await eventually(lambda: not kept_of_requests(), "all objects of the requests are freed")
        await stream.close()
