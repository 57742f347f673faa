"""Check whether the engine can run a sequence, and which of its drafts are usable. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from libs.engine.step.types import EngineInfo, SequenceSpec
from slipstream import bounds
from slipstream.errors import InvalidArgument


def check_spec(spec: SequenceSpec, info: EngineInfo) -> None:
    """Raises InvalidArgument, naming the field, for a sequence that this engine can never run."""
    if not len(spec.prompt):
        raise InvalidArgument("prompt", "is empty")
    if spec.context_tokens >= info.max_context_tokens:
        raise bounds.PROMPT_TOKENS.refused(
            "prompt", prompt_tokens=spec.context_tokens, max_context_tokens=info.max_context_tokens
        )
    if spec.sampling.prompt_logprobs is not None:
        bounds.PROMPT_ROWS.check(len(spec.prompt) * (1 + spec.sampling.prompt_logprobs))
    if spec.sampling.max_tokens <= len(spec.emitted):
        raise InvalidArgument("max_tokens", f"must exceed the {len(spec.emitted)} tokens already emitted")
    largest = max(int(spec.prompt.max()), max(spec.emitted, default=0))
    if largest >= info.vocab_size:
        raise InvalidArgument("prompt", f"token {largest} is outside the vocabulary of {info.vocab_size}")
    for field, tokens in (
        ("logit_bias", spec.sampling.logit_bias),
        ("stop_token_ids", spec.sampling.stop_token_ids),
        ("banned_token_ids", spec.sampling.banned_token_ids),
    ):
        if any(not 0 <= token < info.vocab_size for token in tokens):
            raise InvalidArgument(field, f"has a token outside the vocabulary of {info.vocab_size}")


def n_usable_drafts(drafts: Sequence[int], info: EngineInfo, *, n_tokens: int, n_output_left: int) -> int:
    """How many leading drafts are within the vocabulary, the context window and max_tokens."""
    room = min(info.max_draft_tokens, n_output_left - 1, info.max_context_tokens - n_tokens - 1)
    for j, token in enumerate(drafts[: max(room, 0)]):
        if not 0 <= token < info.vocab_size:
            return j
    return max(min(len(drafts), room), 0)
