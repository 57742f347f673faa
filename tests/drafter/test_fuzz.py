"""Fuzzed messages to DrafterService: refused as bad input, and nothing of them stays."""

from __future__ import annotations

import random

import pytest

from libs.common.cluster.worker_service import held
from libs.common.transport.socket import SocketTransport
from libs.engine.core.fake_head import FakeHead
from slipstream.v1 import drafter_pb2
from tests.drafter.nodes import running_drafter
from tests.support.fuzz.rpc_fuzzer import RpcFuzzer, fuzz
from tests.support.fuzz.seeds import drafter_seeds
from tests.support.logged_errors import logged_errors
from tests.worker.nodes import eventually

SERVICE = drafter_pb2.DESCRIPTOR.services_by_name["DrafterService"]


async def test_fuzzed_messages_are_refused_as_bad_input(caplog: pytest.LogCaptureFixture) -> None:
    await check(caplog)


@pytest.mark.soak
async def test_a_million_fuzzed_messages_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    await check(caplog, inputs=1_000_000)


async def check(caplog: pytest.LogCaptureFixture, inputs: int | None = None) -> None:
    transport = SocketTransport(serves=False)
    async with running_drafter(FakeHead(guess=lambda token: token + 1), transport=transport) as node:

        async def nothing_held() -> None:
            await eventually(lambda: held(node.service.ledger()) == 0)

        await fuzz(
            RpcFuzzer(node.channel, SERVICE, random.Random(15), drafter_seeds()), inputs, settle=nothing_held
        )
    assert not logged_errors(caplog)
