"""Drafts whose features the drafter reads: they save the same steps, and whatever fails costs drafts only."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

from libs.common.checksum import memory_at
from libs.common.transport.open import open_transport
from libs.common.transport.socket import SocketTransport
from libs.common.worker_bounds import MAX_PROMPT_FEATURES
from libs.engine.core.fake import expected_tokens
from libs.engine.core.fake_head import FakeHead
from libs.engine.step.types import SamplingParams
from libs.worker.engine.feature_memory import ExportedFeatures, FeatureMemory
from services.decode.draft_exports import DraftExports
from services.decode.draft_state import DraftLimits
from services.decode.speculation import RemoteSpeculation
from tests.decode.test_speculation import (
    LIMITS,
    StuckHead,
    continued,
    generate,
    guess,
    speculation_with,
    trust,
)
from tests.drafter.nodes import DrafterNode, running_drafter
from tests.worker.nodes import (
    Node,
    RouterStream,
    eventually,
    greedy,
    prompt_tokens,
    running_nodes,
    script,
    start_request,
)

GREEDY = SamplingParams(temperature=0.0)
BYTES = "slipstream_draft_feature_bytes_total"
PULLED = "slipstream_feature_bytes_pulled_total"


class LateExports(RemoteSpeculation):
    """Starts with exports of the node's memory, which exists before `start` in a decode worker only."""

    def export_from(self, node: Node, **more: Any) -> None:
        transport, counters = node.core.transport, node.core.counters
        self.exports = DraftExports(node.core.features, transport, counters, **{"least_bytes": 1, **more})


@dataclass
class Rig:
    speculation: LateExports
    drafter: DrafterNode
    decode: Node
    prefill: Node

    def sent(self, way: str) -> float:
        return self.decode.core.counters.snapshot().get(f'{BYTES}{{way="{way}"}}', 0)

    async def nothing_left(self) -> None:
        await self.decode.wait_idle()  # also: no slot of features is held
        assert self.speculation.exports is not None and len(self.speculation.exports) == 0
        memory = self.drafter.memory
        assert memory is not None
        await eventually(lambda: self.drafter.batcher.sequences == memory.held_bytes == 0)


@contextlib.asynccontextmanager
async def rig(
    head: FakeHead | None = None,
    *,
    kind: str = "socket",
    limits: DraftLimits = LIMITS,
    trusted: bool = True,
    **more: Any,
) -> AsyncIterator[Rig]:
    """A decode worker that exports every piece, its drafter and a prefill worker."""
    transport = open_transport(kind) if kind != "socket" else SocketTransport(serves=False)
    async with (
        running_drafter(head or FakeHead(guess=guess), transport=transport) as drafter,
        running_nodes() as nodes,
    ):
        endpoint: list[str] = []  # the stream begins when the exports are there

        async def find() -> str | None:
            return endpoint[0] if endpoint else None

        speculation = LateExports(find, limits)
        decode = await nodes.decode(speculation=speculation, next_token=script, n_pages=256)
        speculation.export_from(decode, **more)
        endpoint.append(drafter.host.endpoint)
        built = Rig(speculation, drafter, decode, await nodes.prefill(next_token=script))
        if trusted:
            await trust(decode, speculation)
        yield built


async def test_right_drafts_save_the_same_steps() -> None:
    async with rig() as it:
        stats = await continued(it.prefill, it.decode, prompt_tokens(30))
        assert (stats.decode_steps, stats.accepted_drafts) == (10, 30)
        assert it.sent("transport") and it.drafter.count(PULLED)
        await it.nothing_left()


async def test_small_pieces_stay_in_messages() -> None:
    # 8 values of 2 bytes a row: a prompt's 30 rows are large, the rows of a step are not.
    async with rig(least_bytes=160) as it:
        tokens = prompt_tokens(30)
        stats = await continued(it.prefill, it.decode, tokens)
        assert stats.accepted_drafts == 30
        assert it.sent("transport") == it.drafter.count(PULLED) >= 30 * 16
        assert it.sent("message") > 0
        await it.nothing_left()


async def test_another_transport_sends_messages() -> None:
    async with rig(kind="mooncake") as it:
        stats = await continued(it.prefill, it.decode, prompt_tokens(30))
        assert stats.accepted_drafts == 30
        assert it.sent("message") and not it.sent("transport")
        await it.nothing_left()


async def test_without_a_free_slot_features_travel_in_messages() -> None:
    async with rig() as it:
        features = it.decode.core.features
        await it.nothing_left()  # of the sequence before
        before = it.sent("transport")
        taken = [features.export(b"others") for _ in range(MAX_PROMPT_FEATURES)]
        assert all(taken)
        answer, stats = await generate(it.decode, prompt_tokens(20), "full")
        assert answer == expected_tokens(it.decode.engine, prompt_tokens(20), GREEDY, n=40)
        assert stats.accepted_drafts >= 25
        assert it.sent("transport") == before and it.sent("message")
        for exported in taken:
            assert exported is not None
            features.release(exported)
        await it.nothing_left()


async def test_changed_bytes_cost_drafts_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process at Mooncake's port changes what the decode worker exported."""
    export = FeatureMemory.export

    def damaged(self: FeatureMemory, packed: bytes) -> ExportedFeatures | None:
        exported = export(self, packed)
        assert exported is not None
        memory_at(exported.address, 1)[0] ^= 1
        return exported

    async with rig() as it:
        monkeypatch.setattr(FeatureMemory, "export", damaged)
        tokens = prompt_tokens(20)
        answer, stats = await generate(it.decode, tokens, "attacked")
        assert answer == expected_tokens(it.decode.engine, tokens, GREEDY, n=40)
        found = it.drafter.count("slipstream_kv_checksum_failures_total")
        assert found == it.drafter.count("slipstream_draft_rows_unread_total") >= 1
        # Afterwards rows are in messages, and the context begins with them.
        assert it.sent("message") and stats.accepted_drafts > 0
        await it.nothing_left()


async def test_a_drafter_that_hangs_holds_slots_for_a_while_only() -> None:
    head = StuckHead()
    limits = DraftLimits(draft_tokens=3, wait_cap_ms=20.0, patience_ms=30.0)
    async with rig(head, limits=limits, timeout_s=0.2) as it:
        head.stuck = True
        tokens = prompt_tokens(20)
        answer, _ = await generate(it.decode, tokens, n=100)
        assert answer == expected_tokens(it.decode.engine, tokens, GREEDY, n=100)
        await eventually(lambda: it.decode.core.features.held_bytes == 0, "slots freed by their timer")
        assert not head.release.is_set()
        head.release.set()
        head.stuck = False
        await it.nothing_left()


async def test_a_drafter_that_goes_in_the_middle_frees_its_slots() -> None:
    head = StuckHead()
    limits = DraftLimits(draft_tokens=3, wait_cap_ms=20.0, patience_ms=30.0)
    async with rig(head, limits=limits, timeout_s=600.0) as it:
        head.stuck = True
        tokens = prompt_tokens(20)
        stream = RouterStream(it.decode)
        await stream.call.write(start_request(it.decode, tokens, sampling=greedy(300)))
        assert it.speculation.exports is not None
        exports = it.speculation.exports
        await eventually(lambda: len(exports) > 0, "a piece that is not answered")
        await it.drafter.host.stop(grace_s=0)
        await eventually(lambda: not it.speculation.connected and len(exports) == 0)
        assert it.decode.core.features.held_bytes == 0
        head.release.set()
        await stream.last()
        assert stream.tokens() == expected_tokens(it.decode.engine, tokens, GREEDY, n=300)
        await stream.close()
        await it.decode.wait_idle()


async def test_an_aborted_sequence_leaves_no_slot() -> None:
    head = StuckHead()
    limits = DraftLimits(draft_tokens=3, wait_cap_ms=20.0, patience_ms=30.0)
    async with rig(head, limits=limits, timeout_s=600.0) as it:
        head.stuck = True
        stream = RouterStream(it.decode)
        await stream.call.write(start_request(it.decode, prompt_tokens(20), sampling=greedy(300)))
        assert it.speculation.exports is not None
        exports = it.speculation.exports
        await eventually(lambda: len(exports) > 0)
        await stream.close()  # which aborts
        head.release.set()
        head.stuck = False
        await eventually(lambda: len(exports) == 0, "the answer that came nevertheless")
        await it.nothing_left()


async def test_a_speculation_without_exports_talks_to_a_drafter_that_reads() -> None:
    async with (
        running_drafter(FakeHead(guess=guess), transport=SocketTransport(serves=False)) as drafter,
        running_nodes() as nodes,
    ):
        speculation = speculation_with(drafter.host.endpoint)
        node = await nodes.decode(speculation=speculation, next_token=script)
        async with asyncio.timeout(60):
            await trust(node, speculation)
        assert not drafter.count(PULLED)
        await node.wait_idle()
