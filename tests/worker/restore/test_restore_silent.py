"""Stopped and hanging KV sources: a prompt waits within its budget, then computes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import grpc
import pytest

from libs.common.checksum import UNKEYED, memory_at
from libs.common.cluster.worker_record import Role
from libs.common.transport.base import Landed, ReadOp, TransferTimeout
from libs.engine.core.fake import expected_tokens
from libs.engine.step.types import SamplingParams
from slipstream.v1 import common_pb2, prefill_pb2, prefill_pb2_grpc
from supervisor.configuration.cluster_options import DEFAULT_MODEL
from supervisor.ports import free_ports
from tests.support.clusters.worker_processes import WorkerProcess
from tests.support.processes.process_checks import is_stopped
from tests.support.stubs.remote_prompt import RemotePrompt
from tests.worker.kvstore_node import running_kvstore
from tests.worker.nodes import (
    BLOCK_TOKENS,
    WAIT_S,
    Node,
    PrefillCall,
    RouterStream,
    attempt,
    eventually,
    prefill_request,
    prompt_tokens,
    running_nodes,
    start_request,
)

GREEDY = SamplingParams(temperature=0.0)
DRAM, PEER = common_pb2.CACHE_TIER_DRAM, common_pb2.CACHE_TIER_PEER
FLOOR_MS = 1000.0
N_TOKENS = 82
VOCAB = int(json.loads((DEFAULT_MODEL / "config.json").read_text())["vocab_size"])
# The source is a process without a cluster secret.
ENGINE: dict[str, Any] = {"vocab_size": VOCAB, "row_bytes": 64, "checksum": UNKEYED}


async def prefill(node: Node, channel: grpc.aio.Channel, seed: int, **sources: str) -> dict[int, int]:
    """Prefill prompt number `seed`, release, check the first token; return cached tokens by tier."""
    tokens = prompt_tokens(N_TOKENS, seed=seed)
    request = prefill_request(node, tokens, attempt=attempt(f"r{seed}-{os.urandom(4).hex()}"), **sources)
    stub = prefill_pb2_grpc.PrefillServiceStub(channel)
    answers = [event async for event in RemotePrompt(channel, request)]
    ticket = prefill_pb2.HandoffTicket.FromString(answers[0].opened.ticket)
    first = answers[-1].first_token
    await stub.ReleaseHandoff(prefill_pb2.ReleaseHandoffRequest(handoff_id=ticket.handoff_id))
    assert first.token_id == expected_tokens(node.engine, tokens, GREEDY, n=1)[0]
    return {c.tier: c.tokens for c in first.cached}


def counted(node: Node, name: str) -> int:
    return int(node.core.counters.snapshot().get(f"slipstream_kv_restores_{name}_total", 0))


class StoppedProcess:
    """Context in which a worker process is stopped by SIGSTOP."""

    def __init__(self, worker: WorkerProcess) -> None:
        self._pid = worker.pid

    async def __aenter__(self) -> None:
        os.kill(self._pid, signal.SIGSTOP)
        await eventually(lambda: is_stopped(self._pid), "a stopped process")

    async def __aexit__(self, *_: object) -> None:
        os.kill(self._pid, signal.SIGCONT)


@pytest.mark.parametrize("role", [Role.KVSTORE, Role.PREFILL])
async def test_only_the_first_prompt_waits_for_a_stopped_source_and_it_is_used_after_resuming(
    role: Role, tmp_path: Path
) -> None:
    arguments = ["--disk-bytes", "0"] if role is Role.KVSTORE else ["--block-tokens", str(BLOCK_TOKENS)]
    (port,) = free_ports(1, rng=Random())
    async with running_nodes() as nodes, WorkerProcess(role, "source", port, tmp_path, *arguments) as source:
        one = await nodes.prefill("prefill-1", **ENGINE)
        two = await nodes.prefill("prefill-2", restore_floor_ms=FLOOR_MS, n_pages=256, **ENGINE)
        asked = {"kvstore_endpoint" if role is Role.KVSTORE else "peer_endpoint": source.endpoint}
        tier = DRAM if role is Role.KVSTORE else PEER
        numbers = iter(range(10_000))

        async def stored_prompt() -> int:
            """Return the number of a prompt whose KV the source has and the second worker lacks."""
            number = next(numbers)
            if role is Role.PREFILL:
                async with grpc.aio.insecure_channel(source.endpoint) as channel:
                    await prefill(one, channel, number)
                return number
            await prefill(one, one.channel, number, **asked)
            await one.core.writer.flush(timeout_s=WAIT_S)
            return number

        async def until_restored() -> None:
            async with asyncio.timeout(4 * WAIT_S):
                while not (await prefill(two, two.channel, await stored_prompt(), **asked)).get(tier):
                    pass

        await until_restored()
        await eventually(lambda: source.endpoint not in two.core.restorer.sources.breaker)
        held = [await stored_prompt() for _ in range(5)]
        given_up, skipped = counted(two, "given_up"), counted(two, "skipped")
        async with StoppedProcess(source):
            for number in held:
                assert await prefill(two, two.channel, number, **asked) == {}
            # The first prompt waited for its budget; the later ones did not wait.
            assert counted(two, "given_up") == given_up + 1
            assert counted(two, "skipped") == skipped + len(held) - 1
        await until_restored()
        await one.wait_idle()
        await two.wait_idle()


class StuckRead:
    """A transport read that lands `n_good` of its parts and then hangs, even when cancelled."""

    def __init__(self, node: Node, n_good: int) -> None:
        self._read, self._n_good = node.core.transport.read, n_good
        self.may_end = asyncio.Event()
        self.written = 0

    async def __call__(
        self, session_id: str, reads: Sequence[ReadOp], *, timeout_s: float, landed: Landed | None = None
    ) -> None:
        await self._read(session_id, reads[: self._n_good], timeout_s=timeout_s, landed=landed)
        while not self.may_end.is_set():
            try:
                await self.may_end.wait()
            except asyncio.CancelledError:
                continue
        for op in reads[self._n_good :]:
            memory_at(op.local_address, op.n_bytes)[:] = b"\xee" * op.n_bytes
            self.written += op.n_bytes
        raise TransferTimeout("late", quiet=True)


@pytest.mark.parametrize("n_pages", [128, 21], ids=["room", "no-room"])
async def test_late_bytes_of_an_abandoned_read_reach_no_prompt(
    n_pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, n_good = prompt_tokens(N_TOKENS), 5
    async with running_kvstore() as kvstore, running_nodes() as nodes:
        one, decode = await nodes.prefill("prefill-1"), await nodes.decode()
        two = await nodes.prefill("prefill-2", restore_floor_ms=FLOOR_MS, n_pages=n_pages)
        await prefill(one, one.channel, 0, kvstore_endpoint=kvstore.endpoint)
        await one.core.writer.flush(timeout_s=WAIT_S)
        monkeypatch.setattr("libs.worker.restore.block_fetcher.JOINED_BYTES", 1)
        stuck = StuckRead(two, n_good)
        monkeypatch.setattr(two.core.transport, "read", stuck)
        request = prefill_request(two, tokens, attempt=attempt("b"), kvstore_endpoint=kvstore.endpoint)
        call = PrefillCall(two, request)
        ticket = (await call.opened()).ticket
        stream = RouterStream(decode)
        await stream.call.write(start_request(decode, tokens, attempt=attempt("b"), ticket=ticket))
        await eventually(lambda: two.core.fetcher.quarantined_pages > 0, "late pages")
        late = two.core.fetcher.quarantined_pages
        if n_pages < 40:  # no other pages are free: the prompt waits for the read's end
            stuck.may_end.set()
        first = await call.first_token()
        cached = {c.tier: c.tokens for c in first.cached}
        assert cached.get(DRAM, 0) <= n_good * BLOCK_TOKENS and counted(two, "given_up") == 1
        await stream.last("b")
        assert [first.token_id, *stream.tokens("b")] == expected_tokens(two.engine, tokens, GREEDY, n=8)
        stuck.may_end.set()
        await eventually(lambda: two.core.fetcher.quarantined_pages == 0, "no late pages")
        assert stuck.written and late
        for node in (one, two, decode, kvstore):
            await node.wait_idle()
        monkeypatch.undo()
        await prefill(two, two.channel, 0)  # from its own pages, which hold no late byte
        await stream.close()
