"""Made loads for cache policies: each a list of chains of block numbers, in the order of requests. Pure.

Kinds that suit LRU, kinds that it cannot serve, kinds made to mislead what learns, and mixtures.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterator

Chain = tuple[int, ...]
Load = Callable[[random.Random, int, int], list[Chain]]


def zipf(rng: random.Random, n_requests: int, capacity: int) -> list[Chain]:
    """Documents of 1 to 8 blocks, some wanted far more often than others."""
    n = max(capacity, 8)
    lengths = [rng.randint(1, 8) for _ in range(n)]
    weights = list(itertools.accumulate(1 / (rank + 1) ** 0.9 for rank in range(n)))
    picked = rng.choices(range(n), cum_weights=weights, k=n_requests)
    return [tuple(range(8 * i, 8 * i + lengths[i])) for i in picked]


def loop(rng: random.Random, n_requests: int, capacity: int) -> list[Chain]:
    """The same documents over and over, a little more than fit: LRU never hits."""
    length = rng.randint(1, 6)
    n = int(capacity * rng.uniform(1.05, 1.6)) // length + 1
    return [tuple(range(8 * (i % n), 8 * (i % n) + length)) for i in range(n_requests)]


def floods(rng: random.Random, n_requests: int, capacity: int) -> list[Chain]:
    """A working set that fits, and floods of documents that are wanted once."""
    working = max(2, capacity // 10)
    fresh = itertools.count(1 << 20)
    chains: list[Chain] = []
    while len(chains) < n_requests:
        chains += [(8 * i, 8 * i + 1, 8 * i + 2) for i in rng.choices(range(working), k=rng.randint(5, 60))]
        for _ in range(rng.randint(0, max(1, capacity // 6))):
            start = 8 * next(fresh)
            chains.append(tuple(range(start, start + 6)))
    return chains[:n_requests]


def recent(rng: random.Random, n_requests: int, capacity: int) -> list[Chain]:
    """What was wanted last is wanted next; the set drifts: LRU is as good as it gets."""
    stack: list[int] = []
    fresh = itertools.count()
    chains: list[Chain] = []
    mean = max(1.0, capacity / 6)
    for _ in range(n_requests):
        distance = int(rng.expovariate(1 / mean))
        document = next(fresh) if distance >= len(stack) or rng.random() < 0.1 else stack.pop(-1 - distance)
        stack.append(document)
        del stack[: -4 * capacity]
        chains.append((8 * document, 8 * document + 1, 8 * document + 2))
    return chains


def agents(rng: random.Random, n_requests: int, capacity: int) -> list[Chain]:
    """Sessions of growing chains behind shared system prompts, with time to think between their turns."""
    fresh = itertools.count(1 << 10)
    mean_think = rng.choice([0.3, 1.0, 3.0]) * capacity / 8
    waiting: list[tuple[float, int, Chain]] = []
    now, chains = 0.0, []
    for number in range(n_requests):
        now += 1.0
        if waiting and waiting[0][0] <= now:
            chain = heapq.heappop(waiting)[2]
        else:
            prompt = rng.randrange(4)
            chain = tuple(range(8 * prompt, 8 * prompt + 4))
        chain += tuple(next(fresh) for _ in range(rng.randint(1, 8)))
        chains.append(chain)
        if rng.random() < 0.75:
            heapq.heappush(waiting, (now + rng.lognormvariate(0, 0.7) * mean_think, number, chain))
    return chains


def scans(rng: random.Random, n_requests: int, capacity: int) -> list[Chain]:
    """Nothing is ever wanted again, but for now and then the last few documents."""
    chains: list[Chain] = []
    fresh = itertools.count()
    for _ in range(n_requests):
        if chains and rng.random() < 0.1:
            chains.append(rng.choice(chains[-5:]))
        else:
            start = 8 * next(fresh)
            chains.append(tuple(range(start, start + rng.randint(1, 8))))
    return chains


def betrayal(rng: random.Random, n_requests: int, capacity: int) -> list[Chain]:
    """Teaches that what was often wanted comes back, and then never wants it again; and the reverse."""
    chains: list[Chain] = []
    base = 0
    while len(chains) < n_requests:
        often = [base + 8 * i for i in range(max(2, capacity // 8))]
        for _ in range(6):
            chains += [(start, start + 1, start + 2) for start in often]
        base += 8 * len(often)
        once = [base + 8 * i for i in range(max(2, capacity // 5))]
        for back in range(len(once)):
            chains.append((once[back], once[back] + 1, once[back] + 2))
            if back:
                again = once[back - rng.randint(0, min(back, max(1, capacity // 12)))]
                chains.append((again, again + 1, again + 2))
        base += 8 * len(once)
    return chains[:n_requests]


def mixture(rng: random.Random, n_requests: int, capacity: int) -> list[Chain]:
    """Two of the others at once."""
    kinds = rng.sample([zipf, loop, floods, recent, agents, scans, betrayal], 2)
    loads = [iter(kind(rng, n_requests, max(8, capacity // 2))) for kind in kinds]
    return [_moved(next(loads[which]), which) for which in rng.choices((0, 1), k=n_requests)]


def shifting(rng: random.Random, n_requests: int, capacity: int) -> list[Chain]:
    """One of the others after another."""
    return list(itertools.islice(_shifts(rng, n_requests, capacity), n_requests))


def _shifts(rng: random.Random, n_requests: int, capacity: int) -> Iterator[Chain]:
    for number in itertools.count():
        kind = rng.choice([zipf, loop, floods, recent, agents, scans, betrayal])
        for chain in kind(rng, max(1, n_requests // rng.randint(3, 8)), capacity):
            yield _moved(chain, number)


def _moved(chain: Chain, where: int) -> Chain:
    """The same chain in a separate range of block numbers."""
    return tuple(block + (where << 32) for block in chain)


LOADS: dict[str, Load] = {
    load.__name__: load for load in (zipf, loop, floods, recent, agents, scans, betrayal, mixture, shifting)
}
