"""A prompt's wait counts the tokens computed for others; the engine ends it despite newer prompts."""

from __future__ import annotations

from libs.common.prefill_order import OVERDUE_SHARE, PATIENCE
from libs.engine.core.fake import build_fake_engine
from tests.engine.support import check_accounting, make_spec

STEP_TOKENS, NEED, SHORT = 16, 60, 12


def test_a_prompt_among_many_shorter_ones_ends_after_a_multiple_of_its_need() -> None:
    engine = build_fake_engine(
        n_pages=512,
        block_tokens=4,
        vocab_size=50,
        max_context_tokens=128,
        max_batch=8,
        step_tokens=STEP_TOKENS,
    )
    long = make_spec("long", [1] * NEED, max_tokens=1)
    engine.reserve(long)
    engine.start("long")
    (sequence,) = engine.sequences()
    waited, steps = [], 0
    while sequence.pending_tokens and sequence.n_output == 0:
        for i in range(2):  # more than a step can compute
            short = make_spec(f"{steps}.{i}", [2 + i, *([3 + steps % 40] * (SHORT - 1))], max_tokens=1)
            engine.reserve(short)
            engine.start(short.seq_id)
        before, n_computed = sequence.waited_tokens, sequence.n_computed
        for output in engine.step():
            if output.finish is not None and output.seq_id != "long":
                engine.release(output.seq_id)
        own = NEED if sequence.n_output else sequence.n_computed
        assert sequence.waited_tokens - before == STEP_TOKENS - (own - n_computed)
        if own > n_computed:
            waited.append(before)
        steps += 1
        assert steps < 100, "the prompt starved"
        check_accounting(engine)
    assert PATIENCE * NEED <= waited[0] < PATIENCE * NEED + STEP_TOKENS
    assert len(waited) <= NEED / (STEP_TOKENS // OVERDUE_SHARE)
