"""A draft head in the decode worker: it saves steps, changes no token, and may fail."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from libs.common.checksum import memory_at
from libs.engine.core.fake import expected_tokens
from libs.engine.core.fake_head import FakeHead
from libs.engine.step.draft_head import ContextRows, HeadRows
from libs.engine.step.types import SamplingParams, StepOutput
from libs.worker.engine.feature_memory import ExportedFeatures, FeatureMemory
from libs.worker.requests.messages import FEATURE_BYTES
from services.decode.draft_gate import DraftGate
from services.decode.local_speculation import LocalSpeculation
from tests.decode.test_speculation import continued, generate, guess
from tests.worker.nodes import (
    Node,
    prompt_tokens,
    running_nodes,
    script,
)

GREEDY = SamplingParams(temperature=0.0)


class StrictHead(FakeHead):
    """Refuses rows that leave a gap, and proposals without the newest row."""

    def __init__(self) -> None:
        super().__init__(guess=guess)
        self.ends: dict[str, int] = {}
        self.fails = False

    def extend_batch(self, rows: Sequence[HeadRows]) -> None:
        if self.fails:
            raise ValueError("a kernel failed")
        for r in rows:
            self.ends[r.seq_id] = r.end_position
        super().extend_batch(rows)


def local(head: FakeHead, gate: DraftGate | None = None) -> LocalSpeculation:
    speculation = LocalSpeculation(draft_tokens=3, gate=gate)
    speculation.load(head)
    return speculation


async def test_right_drafts_save_steps_and_change_nothing() -> None:
    tokens, head = prompt_tokens(20), StrictHead()
    async with running_nodes() as nodes:
        node = await nodes.decode(speculation=local(head), next_token=script)
        answer, stats = await generate(node, tokens)
        assert answer == expected_tokens(node.engine, tokens, GREEDY, n=40)
        assert stats.accepted_drafts >= 27
        assert stats.decode_steps <= 12
        plain, without = await generate(node, tokens, "plain", disable_drafts=True)
        assert (plain, without.proposed_drafts) == (answer, 0)
        await generate(node, tokens, "next")  # the head closes contexts with the next step
        assert head.sequences <= 1
        await node.wait_idle()


async def test_wrong_drafts_change_nothing() -> None:
    tokens = prompt_tokens(20)
    async with running_nodes() as nodes:
        node = await nodes.decode(speculation=local(FakeHead(guess=lambda token: token)))
        answer, stats = await generate(node, tokens)
        assert answer == expected_tokens(node.engine, tokens, GREEDY, n=40)
        assert stats.proposed_drafts > 50
        await node.wait_idle()


async def test_the_first_step_after_a_handoff_has_drafts() -> None:
    tokens = prompt_tokens(30)
    async with running_nodes() as nodes:
        decode = await nodes.decode(speculation=local(StrictHead()), next_token=script)
        prefill = await nodes.prefill(next_token=script)
        stats = await continued(prefill, decode, tokens)
        assert stats.decode_steps == 10
        width = decode.core.info.feature_width
        assert pulled_features(decode) == 30 * width * FEATURE_BYTES


async def test_damaged_features_of_a_prompt_cost_drafts_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process at Mooncake's port changes a byte of what the prefill worker exported."""
    tokens = prompt_tokens(30)
    export = FeatureMemory.export

    def damaged(self: FeatureMemory, packed: bytes) -> ExportedFeatures | None:
        exported = export(self, packed)
        assert exported is not None
        memory_at(exported.address + 3, 1)[0] ^= 1
        return exported

    monkeypatch.setattr(FeatureMemory, "export", damaged)
    async with running_nodes() as nodes:
        decode = await nodes.decode(speculation=local(StrictHead()), next_token=script)
        prefill = await nodes.prefill(next_token=script)
        stats = await continued(prefill, decode, tokens)
        assert stats.decode_steps > 10
        assert decode.core.counters.snapshot()["slipstream_kv_checksum_failures_total"] == 1
        assert not pulled_features(decode)


def pulled_features(node: Node) -> float:
    return node.core.counters.snapshot().get("slipstream_feature_bytes_pulled_total", 0)


async def test_a_head_that_fails_is_given_up() -> None:
    tokens, head = prompt_tokens(20), StrictHead()
    async with running_nodes() as nodes:
        node = await nodes.decode(speculation=local(head), next_token=script)
        head.fails = True
        answer, stats = await generate(node, tokens)
        assert answer == expected_tokens(node.engine, tokens, GREEDY, n=40)
        assert (stats.decode_steps, stats.proposed_drafts) == (40, 0)
        await node.wait_idle()


@pytest.mark.parametrize("seed", range(3))
async def test_text_is_the_same_while_the_gate_switches(seed: int) -> None:
    """Steps with drafts, with features alone and with neither follow each other."""
    tokens = prompt_tokens(20, seed=seed)
    async with running_nodes() as nodes:
        node = await nodes.decode(
            speculation=local(StrictHead(), DraftGate()), next_token=script, n_pages=256
        )
        answer, stats = await generate(node, tokens, n=300)
        assert answer == expected_tokens(node.engine, tokens, GREEDY, n=300)
        assert stats.drafted_steps > 0
        assert stats.proposed_drafts < 3 * stats.generated_tokens
        await node.wait_idle()


def test_steps_without_drafts_ask_for_no_features() -> None:
    speculation = LocalSpeculation(draft_tokens=3)
    speculation.open("a")
    assert speculation.drafts() == {}
    assert not speculation.wants_features  # no head yet
    speculation.load(FakeHead())
    speculation.drafts()
    assert speculation.wants_features


def test_rows_before_a_step_without_features_are_not_used() -> None:
    """The gate is closed at first: the prompt's rows no longer follow on after a plain step."""
    speculation = local(StrictHead(), DraftGate())
    tokens, features = np.array([1, 2], np.uint32), np.zeros((2, 8), np.float32)
    speculation.open("a", ContextRows("a", 0, tokens, features))
    assert speculation.drafts() == {}
    speculation.stepped([StepOutput("a", (3,), 3)])
    assert speculation._rows == {"a": []}
