"""A sequence through a fresh engine or head, so that the first request does not pay for first uses."""

from __future__ import annotations

import numpy as np

from libs.engine.step.draft_head import MAX_DRAFT_TOKENS, ContextRows, DraftHead
from libs.engine.step.types import FEATURE_WINDOW_TOKENS, Engine, SamplingParams, SequenceSpec
from slipstream.errors import Internal

_SEQ_ID = "warm-up"
_MAX_STEPS = 64


def warm_up(engine: Engine) -> None:
    """Prefill and decode a few tokens; leaves no block behind. Raises what the engine raises."""
    n_tokens = min(engine.info.block_tokens - 1, engine.info.max_context_tokens // 2, 32)
    prompt = np.arange(max(n_tokens, 1), dtype=np.uint32) % engine.info.vocab_size
    n_new = max(engine.info.block_tokens - len(prompt) - 1, 1)
    sampling = SamplingParams(temperature=0.0, max_tokens=min(n_new, 4), ignore_eos=True)
    engine.reserve(SequenceSpec(seq_id=_SEQ_ID, prompt=prompt, sampling=sampling))
    try:
        engine.start(_SEQ_ID)
        for _ in range(_MAX_STEPS):
            outputs = engine.step({})
            if any(output.finish or output.failure for output in outputs):
                return
        raise Internal("the engine does not finish a sequence of a few tokens")
    finally:
        engine.release(_SEQ_ID)


def warm_up_head(head: DraftHead) -> None:
    """Take in a prompt and one step, and draft after each; leaves no context behind."""
    for start, n_rows in ((0, FEATURE_WINDOW_TOKENS), (FEATURE_WINDOW_TOKENS, 1)):
        features = np.zeros((n_rows, head.feature_width), np.float32)
        head.extend_batch([ContextRows(_SEQ_ID, start, np.zeros(n_rows, np.uint32), features)])
        head.propose_batch([_SEQ_ID], MAX_DRAFT_TOKENS)
    head.close(_SEQ_ID)
