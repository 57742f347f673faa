"""One small sequence through a fresh engine, so that the first request does not pay for first uses."""

from __future__ import annotations

import numpy as np

from libs.engine.step.types import Engine, SamplingParams, SequenceSpec
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
