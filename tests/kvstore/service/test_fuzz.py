"""Fuzzed messages to KvstoreService: refused as bad input, and nothing of them stays."""

from __future__ import annotations

import random

import pytest

from slipstream.rpc.dial import dial
from slipstream.v1 import kvstore_pb2
from tests.kvstore.node import FINGERPRINT
from tests.support.fuzz.rpc_fuzzer import RpcFuzzer, fuzz
from tests.support.fuzz.seeds import kvstore_seeds
from tests.support.logged_errors import logged_errors
from tests.worker.kvstore_node import running_kvstore

SERVICE = kvstore_pb2.DESCRIPTOR.services_by_name["KvstoreService"]


async def test_fuzzed_messages_are_refused_as_bad_input(caplog: pytest.LogCaptureFixture) -> None:
    await check(caplog)


@pytest.mark.soak
async def test_a_million_fuzzed_messages_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    await check(caplog, inputs=1_000_000)


async def check(caplog: pytest.LogCaptureFixture, inputs: int | None = None) -> None:
    async with running_kvstore() as node, dial(node.endpoint) as channel:
        fuzzer = RpcFuzzer(channel, SERVICE, random.Random(15), kvstore_seeds(FINGERPRINT))
        # Reservations and pins end by their leases.
        await fuzz(fuzzer, inputs, settle=node.wait_idle)
    assert not logged_errors(caplog)
