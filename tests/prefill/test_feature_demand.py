"""Prompts compute draft features while readers of handoffs ask for them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.prefill.feature_demand import UNASKED_HANDOFFS, FeatureDemand
from tests.prefill.test_draft_rows import handoff, release
from tests.worker.nodes import running_nodes


@given(st.lists(st.sampled_from([0, 0, 0, 512]), max_size=100))
def test_features_are_wanted_unless_none_of_the_last_readers_asked(asked: list[int]) -> None:
    demand = FeatureDemand()
    for draft_rows in asked:
        demand.ask(draft_rows)
    last = asked[-UNASKED_HANDOFFS:]
    assert demand.wants_features is (len(last) < UNASKED_HANDOFFS or any(last))


async def test_prompts_have_features_again_once_a_reader_asks() -> None:
    async with running_nodes() as nodes:
        node = await nodes.prefill()
        for seed in range(UNASKED_HANDOFFS):
            await release(node, (await handoff(node, draft_rows=0, seed=seed))[0].handoff_id)
        states = []
        for seed in (100, 101):
            ticket, complete = await handoff(node, draft_rows=50, seed=seed)
            states.append(complete.draft_state.rows)
            await release(node, ticket.handoff_id)
        assert states[1] == 50


async def test_prompts_have_no_features_while_no_reader_asks() -> None:
    async with running_nodes() as nodes:
        node = await nodes.prefill()
        for seed in range(UNASKED_HANDOFFS + 1):
            await release(node, (await handoff(node, draft_rows=0, seed=seed))[0].handoff_id)
        last = {block_hash for block_hash in node.engine._features._rows}
        await release(node, (await handoff(node, draft_rows=0, seed=99))[0].handoff_id)
        assert last and set(node.engine._features._rows) == last
