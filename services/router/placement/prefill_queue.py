"""How long a prompt waits on each prefill worker, and which queued prompts it delays. Pure.

A worker computes the prompts that need least first (libs/common/prefill_order.py). Of two prompts the shorter
one therefore delays the longer one, whichever came first: a new prompt waits for those that need no more than
it does, and each of the others waits for it. A delay is weighted by what the delayed prompt needs: to one
that needs ten times as much, the new prompt is a tenth of a delay. One more queued prompt only ever adds to
wait and delays. How much longer prompts delay a shorter one all the same is fitted
(`PrefillModel.longer_token_ms`): about nothing, or all of it on a worker that computes in order.

Of requests of other routers only the sums are known, from the worker's report. They count as equal to each
other; tokens of no known number of requests count as served first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from services.router.placement.fleet_arrays import Column, PrefillArrays


@dataclass(slots=True)
class QueueDelay:
    """A prompt waits for `ahead_tokens` of `ahead_requests`. Others, which need `longer_tokens`, wait for it,
    and their delays weigh as much as `delays` requests of the prompt's own size.

    Of other routers' requests, `longer_tokens` counts only what they need beyond the prompt's size each.
    `load_tokens` is the load that bounded load compares: no queued prompt counts for more than the new one,
    which may overtake it.
    """

    ahead_tokens: Column
    ahead_requests: Column
    longer_tokens: Column
    delays: Column
    load_tokens: Column


def queue_delay(prefill: PrefillArrays, uncached_tokens: Column, prompt_tokens: int) -> QueueDelay:
    """The delay on each row for a prompt of which `uncached_tokens` are to be computed there."""
    n = len(uncached_tokens)
    other_tokens, other_requests = prefill.other_tokens, prefill.other_requests
    needed_tokens = uncached_tokens * other_requests
    # Equal requests of other routers that need more than this prompt: they wait for it. Their delays count in
    # full, so only what they need beyond this prompt is in `longer_tokens`: one more, however short, adds.
    others_wait = (other_tokens > needed_tokens) & (other_requests > 0)
    ahead_tokens = np.where(others_wait, 0.0, other_tokens)
    ahead_requests = np.where(others_wait, 0.0, other_requests)
    longer_tokens = np.where(others_wait, other_tokens - needed_tokens, 0.0)
    delays = np.where(others_wait, other_requests, 0.0)
    # Without a known number of requests all tokens count, as if there were infinitely many requests.
    most_tokens = np.where(other_requests > 0, prompt_tokens * other_requests, np.inf)
    load_tokens = np.minimum(other_tokens, most_tokens)
    tokens, rows = prefill.queues()
    if len(tokens):
        uncached = uncached_tokens[rows]
        goes_first = tokens <= uncached  # libs.common.prefill_order.goes_before
        own_ahead = np.bincount(rows, tokens * goes_first, n)
        # A request without tokens goes first: the divisor 1 is not used.
        weights = uncached / np.maximum(tokens, 1.0) * ~goes_first
        ahead_tokens = own_ahead + ahead_tokens
        ahead_requests = np.bincount(rows, goes_first, n) + ahead_requests
        longer_tokens = prefill.own_tokens - own_ahead + longer_tokens
        delays = np.bincount(rows, weights, n) + delays
        load_tokens = np.bincount(rows, np.minimum(tokens, prompt_tokens), n) + load_tokens
    return QueueDelay(ahead_tokens, ahead_requests, longer_tokens, delays, load_tokens)
