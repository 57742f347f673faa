"""When a prompt's turn comes on a prefill worker, and whose turn it puts off. Pure.

A worker computes those of its prompts first that need least, and the oldest a quarter of the time
(libs/common/prefill_order.py). So of two prompts the shorter delays the longer, whichever came first: a new
prompt waits for those that need no more than it does, and each of the others waits for it. Both are counted
here; in tokens, they sum to the sum of min(theirs, ours), which never falls when a queue grows. How much the
longer ones delay it all the same is learnt (`PrefillModel.longer_token_ms`): nothing, the oldest one's
quarter, or all of it on a worker that computes in order.
"""

from __future__ import annotations

from dataclasses import dataclass

from libs.common.prefill_order import goes_before
from services.router.placement_types import PrefillWorker


@dataclass(frozen=True, slots=True)
class Turn:
    """A prompt waits for `ahead_tokens` of `ahead_requests`; `behind_requests`, which need `behind_tokens`,
    wait for it."""

    ahead_tokens: int
    ahead_requests: int
    behind_requests: int
    behind_tokens: int


def turn_of(uncached_tokens: int, worker: PrefillWorker) -> Turn:
    """The place of a prompt that needs so many tokens."""
    ahead = [tokens for tokens in worker.queue if goes_before(tokens, uncached_tokens)]
    behind = len(worker.queue) - len(ahead)
    tokens, requests = sum(ahead), len(ahead)
    behind_tokens = sum(worker.queue) - tokens
    other_tokens, others = _others(worker)
    if others and not goes_before(other_tokens, uncached_tokens * others):
        behind, behind_tokens = behind + others, behind_tokens + other_tokens
    else:
        tokens, requests = tokens + other_tokens, requests + others
    return Turn(tokens, requests, behind, behind_tokens)


def load_of(prompt_tokens: int, worker: PrefillWorker) -> int:
    """The load that bounded load goes by: no prompt there counts for more than this one, which may
    overtake it."""
    own = sum(min(tokens, prompt_tokens) for tokens in worker.queue)
    other_tokens, others = _others(worker)
    return own + (min(other_tokens, prompt_tokens * others) if others else other_tokens)


def _others(worker: PrefillWorker) -> tuple[int, int]:
    """Tokens and number of the requests of which only the sums are known, which are taken to be equal.
    Tokens of no known number of requests are taken to go first."""
    return (
        max(worker.queued_tokens - sum(worker.queue), 0),
        max(worker.queued_requests - len(worker.queue), 0),
    )
