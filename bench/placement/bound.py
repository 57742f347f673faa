"""The bound that rules are measured against: one cache of the same total size, common to all workers.

With one queue in front, first come, first served: a rule may be ahead of that where work piles up and short
prompts go first. With no queue at all: no rule can be ahead of that by its order.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from bench.placement.cache import LruCache
from bench.placement.model import Hardware, percentile
from bench.placement.trace import BLOCK_TOKENS, TraceRequest


@dataclass(frozen=True, slots=True)
class Bound:
    """90th percentiles of the time to first token, milliseconds. `one_queue`: all workers take prompts from
    one queue, in order; `no_queue`: there is a worker for each prompt."""

    one_queue_p90_ms: float
    no_queue_p90_ms: float


def bound(requests: Sequence[TraceRequest], hardware: Hardware) -> Bound:
    """The bound without noise, where every worker reaches every block at no cost."""
    return Bound(_p90_ms(requests, hardware, hardware.n_prefill), _p90_ms(requests, hardware, len(requests)))


def _p90_ms(requests: Sequence[TraceRequest], hardware: Hardware, n_workers: int) -> float:
    cache = LruCache(hardware.total_blocks)
    arrivals, queue = deque(requests), deque[TraceRequest]()
    running: list[tuple[float, int, TraceRequest]] = []  # by when they are computed
    now_ms, times_ms = 0.0, []
    while arrivals or running:
        if arrivals and (not running or arrivals[0].at_ms <= running[0][0]):
            now_ms = arrivals[0].at_ms
            queue.append(arrivals.popleft())
        else:
            now_ms, _, done = heapq.heappop(running)
            times_ms.append(now_ms - done.at_ms)
            cache.put(done.hashes)
        while queue and len(running) < n_workers:
            request = queue.popleft()
            held = cache.prefix_blocks(request.hashes) * BLOCK_TOKENS
            uncached = max(request.prompt_tokens - held, 1)
            takes_ms = hardware.prefill.compute_ms(uncached, request.prompt_tokens)
            heapq.heappush(running, (now_ms + takes_ms, request.number, request))
    return percentile(times_ms, 0.9)
