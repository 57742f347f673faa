"""The fake workers, called directly as in the latency part's baseline, and by a router's streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from bench.fakes.pace import Pace
from bench.fakes.rpc_server import RpcServer
from bench.fakes.worker import BLOCK_TOKENS, PacedDecode, PacedPrefill, Prompts
from bench.router.load import WorkerTarget
from libs.common.block_hash import chain_hashes
from libs.common.cluster.fingerprint import TEMPLATE, Fingerprint
from slipstream.block_hashes import pack_hashes
from slipstream.rpc.dial import PLAIN_DIAL, dial
from slipstream.v1 import common_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc

WAIT_S = 60.0
ANSWER = (7, 8, 9)
FINGERPRINT = Fingerprint("bench", "tokenizer", TEMPLATE, "float32", BLOCK_TOKENS)


@dataclass(frozen=True, slots=True)
class Fakes:
    prefill: PacedPrefill
    decode: PacedDecode
    endpoint: str

    async def until_nothing_is_held(self) -> None:
        while self.prefill.held or self.decode.held:
            await asyncio.sleep(0.001)


@pytest.fixture
async def fakes() -> AsyncIterator[Fakes]:
    pace, prompts = Pace(0.0, 0.0, 0.0), Prompts(FINGERPRINT.digest)
    prefill = PacedPrefill(pace, ANSWER, prompts)  # type: ignore[abstract]
    decode = PacedDecode(pace, ANSWER, prompts)
    server = RpcServer()
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(prefill, server)
    decode_pb2_grpc.add_DecodeServiceServicer_to_server(decode, server)
    endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with asyncio.timeout(WAIT_S):
        yield Fakes(prefill, decode, endpoint)
        await server.stop(1.0)


@pytest.mark.parametrize("prompt_tokens", [100, 40_000])
async def test_direct_streams_are_whole_and_leave_nothing(fakes: Fakes, prompt_tokens: int) -> None:
    target = WorkerTarget(fakes.endpoint, fakes.endpoint, FINGERPRINT, PLAIN_DIAL)
    logs = await asyncio.gather(
        *(target.stream(range(index, index + prompt_tokens), max_tokens=40) for index in range(8))
    )
    assert [log.completion_tokens for log in logs] == [40] * 8
    await fakes.until_nothing_is_held()
    await target.close()


async def test_prompts_of_many_frames_on_one_stream_each_have_their_token(fakes: Fakes) -> None:
    starts = []
    for handle in range(1, 9):
        prompt = np.arange(handle, handle + 32_000 * (handle % 2) + 64, dtype="<u4")
        hashes = chain_hashes(prompt, root=FINGERPRINT.digest, salt=b"", block_tokens=BLOCK_TOKENS)
        start = prefill_pb2.StartPrefill(
            handle=handle,
            attempt=common_pb2.Attempt(request_id=f"request-{handle}", attempt=1),
            prompt=prompt.tobytes(),
            block_hashes=pack_hashes(hashes),
            sampling=common_pb2.SamplingParams(max_tokens=1),
        )
        starts.append(start)
    firsts: dict[int, int] = {}
    async with dial(fakes.endpoint) as channel:
        stub: Any = prefill_pb2_grpc.PrefillServiceStub(channel)
        call = stub.Prefill()
        await call.write(prefill_pb2.PrefillRequest(starts=starts[:4]))
        for start in starts[4:]:
            await call.write(prefill_pb2.PrefillRequest(starts=[start]))
        await call.done_writing()
        async for frame in call:
            for event in frame.events:
                if event.HasField("first_token"):
                    firsts[event.handle] = event.first_token.token_id
    assert firsts == dict.fromkeys(range(1, 9), ANSWER[0])
    await fakes.until_nothing_is_held()
