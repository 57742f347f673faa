"""Made loads on which the best policy changes, or none is better than another. Pure.

Each takes a generator of random numbers, a number of requests and the capacity in blocks that sets its scale.
"""

from __future__ import annotations

import heapq
import random

from bench.cache.traces import Chain, Load
from bench.cache.workloads import Blocks, zipf_weights


def varying_loops(rng: random.Random, n_requests: int, capacity: int) -> list[Chain]:
    """Loops whose lengths are about the capacity, each for some rounds."""
    blocks, chains = Blocks(), list[Chain]()
    while len(chains) < n_requests:
        length = rng.randint(1, 6)
        n = int(capacity * rng.uniform(0.6, 2.5)) // length + 1
        documents = [blocks.take(length) for _ in range(n)]
        chains += documents * rng.randint(2, 8)
    return chains[:n_requests]


def long_loop(rng: random.Random, n_requests: int, capacity: int) -> list[Chain]:
    """One loop of up to four capacities."""
    blocks, length = Blocks(), rng.randint(1, 4)
    n = int(capacity * rng.uniform(1.02, 4)) // length + 1
    documents = [blocks.take(length) for _ in range(n)]
    return [documents[number % n] for number in range(n_requests)]


def bimodal_thinkers(rng: random.Random, n_requests: int, capacity: int) -> list[Chain]:
    """Agents whose tools answer at once or after long."""
    blocks, chains = Blocks(), list[Chain]()
    waiting: list[tuple[float, int, Chain, int]] = []
    long = capacity * rng.uniform(0.05, 0.6)
    prompts = [blocks.take(rng.randint(2, 30)) for _ in range(6)]
    for now in range(n_requests):
        if waiting and waiting[0][0] <= now:
            _, _, chain, turns = heapq.heappop(waiting)
        else:
            chain, turns = rng.choice(prompts), 0
        chain += blocks.take(rng.randint(1, 6))
        chains.append(chain)
        if turns < 12 and rng.random() < 0.8:
            think = rng.expovariate(100 / capacity) if rng.random() < 0.6 else long * rng.uniform(0.9, 1.1)
            heapq.heappush(waiting, (now + think, now, chain, turns + 1))
    return chains


def zipf_and_scan(rng: random.Random, n_requests: int, capacity: int) -> list[Chain]:
    """Documents by Zipf, and now and then a scan, mostly of one corpus."""
    blocks, chains = Blocks(), list[Chain]()
    documents = [blocks.take(rng.randint(1, 8)) for _ in range(max(2, capacity // 2))]
    weights = zipf_weights(len(documents), rng.uniform(0.7, 1.1))
    corpus = [blocks.take(rng.randint(2, 10)) for _ in range(int(capacity * rng.uniform(0.1, 0.5)))]
    while len(chains) < n_requests:
        chains += rng.choices(documents, cum_weights=weights, k=rng.randint(50, 600))
        is_known = rng.random() < 0.7
        chains += corpus if is_known else [blocks.take(rng.randint(2, 10)) for _ in corpus]
    return chains[:n_requests]


def alternating(rng: random.Random, n_requests: int, capacity: int) -> list[Chain]:
    """What was wanted last, and documents by Zipf, in turn."""
    blocks, chains = Blocks(), list[Chain]()
    hot = [blocks.take(rng.randint(1, 6)) for _ in range(max(2, capacity // 2))]
    weights = zipf_weights(len(hot), 0.8)
    while len(chains) < n_requests:
        n, stack = rng.randint(200, 1500), list[Chain]()
        if rng.random() < 0.5:
            chains += rng.choices(hot, cum_weights=weights, k=n)
            continue
        for _ in range(n):
            distance = int(rng.expovariate(6 / capacity))
            is_new = distance >= len(stack) or rng.random() < 0.1
            stack.append(blocks.take(3) if is_new else stack.pop(-1 - distance))
            chains.append(stack[-1])
    return chains[:n_requests]


def drift(rng: random.Random, n_requests: int, capacity: int) -> list[Chain]:
    """A window of popularity that moves through a corpus."""
    blocks = Blocks()
    documents = [blocks.take(rng.randint(1, 4)) for _ in range(3 * capacity)]
    width, speed = capacity * rng.uniform(0.05, 0.3), rng.uniform(0.01, 0.3)
    at = (int(number * speed + rng.gauss(0, width)) for number in range(n_requests))
    return [documents[each % len(documents)] for each in at]


def uniform(rng: random.Random, n_requests: int, capacity: int) -> list[Chain]:
    """Documents at random, more than fit: what one policy has beyond another is chance."""
    blocks = Blocks()
    n = max(2, int(capacity * rng.uniform(0.4, 1.5)))
    return rng.choices([blocks.take(rng.randint(1, 5)) for _ in range(n)], k=n_requests)


def nightly(rng: random.Random, n_requests: int, capacity: int) -> list[Chain]:
    """Users by day, and batches over one corpus by night."""
    blocks, chains, now = Blocks(), list[Chain](), 0
    waiting: list[tuple[float, int, Chain]] = []
    corpus = [blocks.take(rng.randint(2, 6)) for _ in range(int(capacity * rng.uniform(0.15, 0.5)))]
    while len(chains) < n_requests:
        for _ in range(rng.randint(300, 900)):
            now += 1
            if waiting and waiting[0][0] <= now:
                chain = heapq.heappop(waiting)[2]
            else:
                chain = blocks.take(rng.randint(1, 10))
            chain += blocks.take(rng.randint(1, 3))
            chains.append(chain)
            if rng.random() < 0.8:
                heapq.heappush(waiting, (now + rng.lognormvariate(0, 1) * capacity / 15, now, chain))
        chains += corpus * rng.randint(1, 3)
    return chains[:n_requests]


_ALL = (varying_loops, long_loop, bimodal_thinkers, zipf_and_scan, alternating, drift, uniform, nightly)
CHANGING: dict[str, Load] = {load.__name__: load for load in _ALL}
