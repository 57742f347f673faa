"""Fuzzed messages to the services of workers: refused as bad input, and nothing of them stays."""

from __future__ import annotations

import random
from typing import Any

import pytest

from slipstream.v1 import decode_pb2, kv_events_pb2, kvstore_pb2, prefill_pb2
from tests.support.fuzz.rpc_fuzzer import RpcFuzzer, fuzz
from tests.support.fuzz.seeds import worker_seeds
from tests.support.logged_errors import logged_errors
from tests.worker.nodes import running_nodes

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


@pytest.mark.parametrize("name", SERVICES)
async def test_fuzzed_messages_are_refused_as_bad_input(name: str, caplog: pytest.LogCaptureFixture) -> None:
    await check(name, caplog)


@pytest.mark.soak
@pytest.mark.parametrize("name", SERVICES)
async def test_a_million_fuzzed_messages_are_refused(name: str, caplog: pytest.LogCaptureFixture) -> None:
    await check(name, caplog, inputs=1_000_000)


@pytest.fixture(autouse=True)
def _short_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fuzzed prompt may ask for the longest lease; an idle node comes after its end."""
    monkeypatch.setattr("services.prefill.handoff_state.MAX_LEASE_MS", 5_000)


async def check(name: str, caplog: pytest.LogCaptureFixture, inputs: int | None = None) -> None:
    async with running_nodes() as nodes:
        node = await (nodes.decode if name == "decode" else nodes.prefill)(restore_floor_ms=50.0)
        fuzzer = RpcFuzzer(
            node.channel,
            SERVICES[name],
            random.Random(15),
            worker_seeds(node.core.fingerprint.to_proto(), page_bytes=node.core.info.page_bytes),
            leave_out=PEER_CACHE_OMITS if name == "peer cache" else frozenset(),
        )
        await fuzz(fuzzer, inputs, settle=node.wait_idle)
    assert not logged_errors(caplog)
