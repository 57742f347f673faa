"""When a prompt's turn comes on a prefill worker, and whose turn it puts off. Pure.

A worker computes those of its prompts first that need least (libs/common/prefill_order.py). So of two prompts
the shorter delays the longer, whichever came first: a new prompt waits for those that need no more than it
does, and each of the others waits for it. A delay counts by what the delayed one needs itself: to one that
needs ten times as much as the new one, the new one is a tenth of a delay. A prompt more in a queue only
ever adds to the two. How much the longer ones delay the new one all the same is learnt
(`PrefillModel.longer_token_ms`): about nothing, or all of it on a worker that computes in order.
"""

from __future__ import annotations

import msgspec

from libs.common.prefill_order import goes_before
from services.router.placement.types import PrefillWorker


class QueueDelay(msgspec.Struct, frozen=True, gc=False):
    """A prompt waits for `ahead_tokens` of `ahead_requests`; others, which need `behind_tokens`, wait for it,
    and that counts as much as `delays` requests of its own size would. Of those of which only sums are known
    `behind_tokens` are what they need beyond its own size each."""

    ahead_tokens: int
    ahead_requests: int
    behind_tokens: int
    delays: float


def turn_of(uncached_tokens: int, worker: PrefillWorker) -> QueueDelay:
    """The place of a prompt that needs so many tokens."""
    tokens = requests = behind_tokens = 0
    delays = 0.0
    for theirs in worker.queue:
        if goes_before(theirs, uncached_tokens):
            tokens, requests = tokens + theirs, requests + 1
        else:
            behind_tokens += theirs
            delays += uncached_tokens / theirs
    other_tokens, others = _others(worker, tokens + behind_tokens)
    if others and not goes_before(other_tokens, uncached_tokens * others):
        # What each of them needs is not known: one that needs more must not make the worker more attractive.
        # Their delays count in full, so of their tokens only those beyond: one more, however short, adds.
        behind_tokens, delays = behind_tokens + other_tokens - uncached_tokens * others, delays + others
    else:
        tokens, requests = tokens + other_tokens, requests + others
    return QueueDelay(tokens, requests, behind_tokens, delays)


def load_of(prompt_tokens: int, worker: PrefillWorker) -> int:
    """The load that bounded load goes by: no prompt there counts for more than this one, which may
    overtake it."""
    own = known = 0
    for tokens in worker.queue:
        known += tokens
        own += tokens if tokens < prompt_tokens else prompt_tokens
    other_tokens, others = _others(worker, known)
    return own + (min(other_tokens, prompt_tokens * others) if others else other_tokens)


def _others(worker: PrefillWorker, known_tokens: int) -> tuple[int, int]:
    """Tokens and number of the requests of which only the sums are known, which are taken to be equal.
    Tokens of no known number of requests are taken to go first. `known_tokens`: of the queue."""
    tokens, requests = worker.queued_tokens - known_tokens, worker.queued_requests - len(worker.queue)
    return tokens if tokens > 0 else 0, requests if requests > 0 else 0
