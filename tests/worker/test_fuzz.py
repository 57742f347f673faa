"""Fuzzed messages to the services of workers: refused as bad input, and nothing of them stays."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest

from slipstream.v1 import common_pb2, decode_pb2, kv_events_pb2, kvstore_pb2, prefill_pb2
from tests.support.fuzz.rpc_fuzzer import RpcFuzzer, fuzz
from tests.worker.nodes import Node, attempt, prefill_request, prompt_tokens, running_nodes, start_request

SERVICES: dict[str, Any] = {
    "prefill": prefill_pb2.DESCRIPTOR.services_by_name["PrefillService"],
    "decode": decode_pb2.DESCRIPTOR.services_by_name["DecodeService"],
    "peer cache": kvstore_pb2.DESCRIPTOR.services_by_name["KvstoreService"],
    "kv events": kv_events_pb2.DESCRIPTOR.services_by_name["KvEventService"],
}
# Of KvstoreService a worker has the reading part.
PEER_CACHE_OMITS = frozenset(
    {"Lookup", "Reserve", "Commit", "CancelReservation", "VerifyBlocks", "DropBlocks"}
)


def seeds(node: Node) -> list[Any]:
    """Valid requests, with the fingerprint and the block hashes of the node."""
    prompts = [prompt_tokens(n, seed=n) for n in (5, 40, 70)]
    starts = [start_request(node, tokens, attempt=attempt(f"r{len(tokens)}")) for tokens in prompts]
    prefills = [
        prefill_request(node, tokens, handle=1 + index, attempt=attempt(f"p{len(tokens)}"))
        for index, tokens in enumerate(prompts)
    ]
    pins = [
        kvstore_pb2.PinsRequest(
            commands=[
                kvstore_pb2.PinCommand(
                    handle=1,
                    pin=kvstore_pb2.PinRequest(
                        fingerprint=node.core.fingerprint.to_proto(),
                        block_hashes=start.block_hashes,
                        owner="w",
                        lease_ms=100,
                    ),
                )
            ]
        )
        for start in prefills
    ]
    ticket = prefill_pb2.HandoffTicket(
        handoff_id="h",
        attempt=attempt("r40"),
        fingerprint=node.core.fingerprint.to_proto(),
        control_endpoint="127.0.0.1:1",
        transport=common_pb2.TRANSPORT_SOCKET,
        transport_session="127.0.0.1:1",
        blocks=[prefill_pb2.ExportedBlock(n_bytes=node.core.info.page_bytes)],
        prompt_tokens=40,
        lease_ms=1000,
    )
    with_ticket = start_request(node, prompts[1], attempt=attempt("r40"), ticket=ticket.SerializeToString())
    aborts = [
        prefill_pb2.AbortPrefillRequest(attempt=attempt("p5")),
        decode_pb2.AbortDecodeRequest(attempt=attempt("r5")),
    ]
    return [
        *starts,
        *(prefill_pb2.PrefillRequest(starts=[start]) for start in prefills),
        *pins,
        ticket,
        with_ticket,
        *aborts,
    ]


@pytest.mark.parametrize("name", SERVICES)
async def test_fuzzed_messages_are_refused_as_bad_input(name: str, caplog: pytest.LogCaptureFixture) -> None:
    await check(name, caplog, inputs=2000)


@pytest.mark.soak
@pytest.mark.parametrize("name", SERVICES)
async def test_a_million_fuzzed_messages_are_refused(name: str, caplog: pytest.LogCaptureFixture) -> None:
    await check(name, caplog, inputs=1_000_000)


@pytest.fixture(autouse=True)
def _short_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fuzzed prompt may ask for the longest lease; an idle node comes after its end."""
    monkeypatch.setattr("services.prefill.handoff_state.MAX_LEASE_MS", 5_000)


async def check(name: str, caplog: pytest.LogCaptureFixture, *, inputs: int) -> None:
    async with running_nodes() as nodes:
        node = await (nodes.decode if name == "decode" else nodes.prefill)(restore_floor_ms=50.0)
        fuzzer = RpcFuzzer(
            node.channel,
            SERVICES[name],
            random.Random(15),
            seeds(node),
            leave_out=PEER_CACHE_OMITS if name == "peer cache" else frozenset(),
        )
        await fuzz(fuzzer, inputs, settle=node.wait_idle)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
