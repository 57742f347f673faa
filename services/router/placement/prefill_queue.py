"""How long a prompt waits on a prefill worker, and which queued prompts it delays. Pure.

A worker computes the prompts that need least first (libs/common/prefill_order.py). Of two prompts the shorter
one therefore delays the longer one, whichever came first. A new prompt waits for those that need no more than
it does, and each of the others waits for it. A delay is weighted by what the delayed prompt needs. To one
that needs ten times as much, the new prompt is a tenth of a delay. One more queued prompt only ever adds to
wait and delays. How much longer prompts delay a shorter one all the same is fitted
(`PrefillModel.longer_token_ms`). It is about nothing, or all of it on a worker that computes in order.

Of requests of other routers only the sums are known, from the worker's report. They count as equal to each
other; tokens of no known number of requests count as served first.
"""

from __future__ import annotations

from services.router.placement.types import PrefillWorker

# (tokens ahead, requests ahead, tokens of longer prompts, delays, load): see `queue_delay`.
QueueDelay = tuple[int, int, int, float, int]


def queue_delay(worker: PrefillWorker, uncached_tokens: int, prompt_tokens: int) -> QueueDelay:
    """The delay for a prompt of which `uncached_tokens` are to be computed on the worker.

    The prompt waits for the tokens and requests ahead. The longer prompts wait for it. Their delays, each by
    the prompt's length, weigh as much as those of `delays` requests of the new prompt's size. Of a request of
    another router, only the tokens beyond that size count as longer. The load is the quantity that bounded
    load compares: a queued prompt counts at most as much as the new one, which may overtake it.
    """
    ahead_tokens = ahead_requests = longer_tokens = load_tokens = 0
    delays = 0.0
    for tokens in worker.queue:
        if tokens <= uncached_tokens:  # as libs.common.prefill_order.goes_before
            ahead_tokens += tokens
            ahead_requests += 1
        else:
            longer_tokens += tokens
            delays += uncached_tokens / tokens
            load_tokens += tokens if tokens < prompt_tokens else prompt_tokens
    load_tokens += ahead_tokens
    other_tokens = worker.queued_tokens - ahead_tokens - longer_tokens
    if other_tokens < 0:
        other_tokens = 0
    other_requests = worker.queued_requests - len(worker.queue)
    if other_requests <= 0:
        return ahead_tokens + other_tokens, ahead_requests, longer_tokens, delays, load_tokens + other_tokens
    most_tokens, needed_tokens = prompt_tokens * other_requests, uncached_tokens * other_requests
    load_tokens += other_tokens if other_tokens < most_tokens else most_tokens
    if other_tokens <= needed_tokens:
        ahead_tokens += other_tokens
        ahead_requests += other_requests
    else:
        # Each of them may need more than is known: one that needs more must not make the worker cheaper.
        # So their delays count in full, and only what they need beyond this prompt is longer.
        longer_tokens += other_tokens - needed_tokens
        delays += other_requests
    return ahead_tokens, ahead_requests, longer_tokens, delays, load_tokens
