"""Fuzzed messages to KvstoreService: refused as bad input, and nothing of them stays."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest

from slipstream.block_hashes import pack_hashes
from slipstream.rpc.dial import dial
from slipstream.v1 import common_pb2, kvstore_pb2
from tests.kvstore.node import FINGERPRINT, key
from tests.support.fuzz.rpc_fuzzer import RpcFuzzer, fuzz
from tests.worker.kvstore_node import running_kvstore

SERVICE = kvstore_pb2.DESCRIPTOR.services_by_name["KvstoreService"]
BLOCK_BYTES = 4096


def seeds() -> list[Any]:
    hashes = pack_hashes([key(1), key(2)])
    pin = kvstore_pb2.PinRequest(fingerprint=FINGERPRINT, block_hashes=hashes, owner="w", lease_ms=100)
    source = kvstore_pb2.SourceBlock(block_hash=key(1), address=4096, n_bytes=BLOCK_BYTES, checksum=bytes(16))
    return [
        kvstore_pb2.LookupRequest(fingerprint=FINGERPRINT, block_hashes=hashes),
        kvstore_pb2.PinsRequest(commands=[kvstore_pb2.PinCommand(handle=1, pin=pin)]),
        kvstore_pb2.ReserveRequest(
            fingerprint=FINGERPRINT, block_hashes=hashes, block_bytes=BLOCK_BYTES, owner="w"
        ),
        kvstore_pb2.CommitRequest(
            transport=common_pb2.TRANSPORT_SOCKET, transport_session="127.0.0.1:1/x", blocks=[source]
        ),
        kvstore_pb2.VerifyBlocksRequest(block_hashes=hashes),
        kvstore_pb2.DropBlocksRequest(block_hashes=hashes),
    ]


async def test_fuzzed_messages_are_refused_as_bad_input(caplog: pytest.LogCaptureFixture) -> None:
    await check(caplog, inputs=2000)


@pytest.mark.soak
async def test_a_million_fuzzed_messages_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    await check(caplog, inputs=1_000_000)


async def check(caplog: pytest.LogCaptureFixture, *, inputs: int) -> None:
    async with running_kvstore() as node, dial(node.endpoint) as channel:
        fuzzer = RpcFuzzer(channel, SERVICE, random.Random(15), seeds())
        # Reservations and pins end by their leases.
        await fuzz(fuzzer, inputs, settle=node.wait_idle)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
