"""While a prompt waits for pages, the kvstore reads its prefix from disk."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from libs.common.rpc.serve import ServiceHost
from slipstream.block_hashes import unpack_hashes
from slipstream.errors import Unavailable
from slipstream.v1 import kvstore_pb2, kvstore_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from tests.support.stubs.partial_servicer import partial_servicer
from tests.worker.nodes import (
    Node,
    PrefillCall,
    attempt,
    eventually,
    hashes_of,
    prefill_request,
    prompt_tokens,
    running_nodes,
)


class RecordingStore(kvstore_pb2_grpc.KvstoreServiceServicer):
    """An empty kvstore that records the chains of Lookup calls."""

    def __init__(self) -> None:
        self.asked: list[list[bytes]] = []

    async def Lookup(self, request: Any, context: Any) -> kvstore_pb2.LookupResponse:
        self.asked.append(unpack_hashes(request.block_hashes))
        raise Unavailable("no lookup here")

    async def Pins(self, request_iterator: Any, context: Any) -> AsyncIterator[kvstore_pb2.PinsResponse]:
        async for request in request_iterator:
            yield kvstore_pb2.PinsResponse(
                answers=[
                    kvstore_pb2.PinAnswer(handle=command.handle, pinned=kvstore_pb2.PinResponse())
                    for command in request.commands
                ]
            )

    async def Reserve(self, request: Any, context: Any) -> kvstore_pb2.ReserveResponse:
        return kvstore_pb2.ReserveResponse()


async def _release(node: Node, call: PrefillCall, handoff_id: str) -> None:
    await call.first_token()
    await prefill_pb2_grpc.PrefillServiceStub(node.channel).ReleaseHandoff(
        prefill_pb2.ReleaseHandoffRequest(handoff_id=handoff_id)
    )


def _ticket(opened: prefill_pb2.HandoffOpened) -> prefill_pb2.HandoffTicket:
    return prefill_pb2.HandoffTicket.FromString(opened.ticket)


async def test_only_a_waiting_prompt_is_looked_up() -> None:
    store, host = partial_servicer(RecordingStore), ServiceHost("127.0.0.1:0")
    kvstore_pb2_grpc.add_KvstoreServiceServicer_to_server(store, host.server)
    await host.start([])
    async with running_nodes() as nodes:
        node = await nodes.prefill(n_pages=16)
        first_tokens, second_tokens = prompt_tokens(40), prompt_tokens(45, seed=1)

        def call(tokens: list[int], request_id: str) -> PrefillCall:
            request = prefill_request(
                node, tokens, attempt=attempt(request_id), kvstore_endpoint=host.endpoint
            )
            return PrefillCall(node, request)

        first = call(first_tokens, "a")
        held = _ticket(await first.opened()).handoff_id
        second = call(second_tokens, "b")
        await eventually(lambda: hashes_of(node, second_tokens) in store.asked)
        assert node.core.pages.waiting == 1
        await _release(node, first, held)
        await _release(node, second, _ticket(await second.opened()).handoff_id)
        await node.wait_idle()
    await host.stop(grace_s=0)
