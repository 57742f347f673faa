"""Made loads of whole services: sessions, agents, documents and floods, as chains of block numbers. Pure.

Each takes a generator of random numbers, a number of requests and the capacity in blocks that sets its scale.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Sequence

from bench.cache.traces import Chain, Load


class Blocks:
    """Numbers of blocks that no chain has yet."""

    def __init__(self, first: int = 1 << 24) -> None:
        self._next = first

    def take(self, n_blocks: int) -> Chain:
        """A chain of blocks that are new."""
        self._next += n_blocks
        return tuple(range(self._next - n_blocks, self._next))


def zipf_weights(n: int, exponent: float) -> list[float]:
    """Cumulative weights of ranks."""
    return list(itertools.accumulate((rank + 1) ** -exponent for rank in range(n)))


class _Sessions:
    """Chains that wait for their next turn."""

    def __init__(self) -> None:
        self._waiting: list[tuple[float, int, Chain, int]] = []
        self._number = 0

    def due(self, now: float) -> tuple[Chain, int] | None:
        if not self._waiting or self._waiting[0][0] > now:
            return None
        _, _, chain, mark = heapq.heappop(self._waiting)
        return chain, mark

    def wait(self, until: float, chain: Chain, mark: int = 0) -> None:
        self._number += 1
        heapq.heappush(self._waiting, (until, self._number, chain, mark))


def chats(rng: random.Random, n_requests: int, capacity: int) -> list[Chain]:
    """Sessions of growing chains with lognormal times to think; few of them last long."""
    blocks, sessions, chains = Blocks(), _Sessions(), list[Chain]()
    mean_think, now = capacity / 20 * rng.choice([0.5, 1.5, 4]), 0.0
    for _ in range(n_requests):
        now += rng.expovariate(1)
        chain, percent = sessions.due(now) or (
            blocks.take(1 + int(rng.paretovariate(1.2)) % 30),
            int(100 * rng.betavariate(1, 1.2)),
        )
        chain = (chain + blocks.take(rng.randint(1, 6)))[:400]
        chains.append(chain)
        if rng.random() < percent / 100:
            sessions.wait(now + rng.lognormvariate(-0.3, 1) * mean_think, chain, percent)
    return chains


def tool_agents(rng: random.Random, n_requests: int, capacity: int) -> list[Chain]:
    """Tools' long prompts by Zipf, and behind them tasks of several quick steps."""
    blocks, sessions, chains = Blocks(), _Sessions(), list[Chain]()
    prompts, weights = [blocks.take(rng.randint(4, 40)) for _ in range(40)], zipf_weights(40, 1.1)
    for now in range(n_requests):
        chain, _ = sessions.due(now) or (rng.choices(prompts, cum_weights=weights)[0], 0)
        chain += blocks.take(rng.randint(1, 12))
        chains.append(chain)
        if rng.random() < 0.6:
            sessions.wait(now + rng.expovariate(1 / max(4, capacity / 60)), chain)
    return chains


def long_thinkers(rng: random.Random, n_requests: int, capacity: int) -> list[Chain]:
    """Agents wait for their tools for about one time: a young block is useless, an old one comes back."""
    blocks, sessions, chains = Blocks(), _Sessions(), list[Chain]()
    mean_think = capacity / 8 * rng.uniform(0.8, 1.6)
    for now in range(n_requests):
        chain, turns = sessions.due(now) or (blocks.take(rng.randint(2, 6)), 0)
        chain += blocks.take(rng.randint(1, 4))
        chains.append(chain)
        if rng.random() < (0.9 if turns else 0.35):
            sessions.wait(now + mean_think * rng.uniform(0.8, 1.2), chain, turns + 1)
    return chains


def tenants(rng: random.Random, n_requests: int, capacity: int) -> list[Chain]:
    """Tenants by Zipf, each with its prompt, its length of sessions and its time to think."""
    blocks, sessions, chains = Blocks(), _Sessions(), list[Chain]()
    prompts = [blocks.take(rng.randint(2, 30)) for _ in range(30)]
    goes_on = [rng.uniform(0.2, 0.95) for _ in prompts]
    thinks = [capacity / 15 * rng.lognormvariate(-1, 1) for _ in prompts]
    grows, weights = [rng.randint(1, 10) for _ in prompts], zipf_weights(30, 0.9)
    for now in range(n_requests):
        found = sessions.due(now)
        if found is None:
            tenant = rng.choices(range(30), cum_weights=weights)[0]
            found = prompts[tenant], tenant
        chain, tenant = found
        chain = (chain + blocks.take(rng.randint(1, grows[tenant])))[:500]
        chains.append(chain)
        if rng.random() < goes_on[tenant]:
            sessions.wait(now + rng.expovariate(1 / thinks[tenant]), chain, tenant)
    return chains


def retrieval(rng: random.Random, n_requests: int, capacity: int) -> list[Chain]:
    """One system prompt, a document by Zipf, and a question that is new."""
    blocks = Blocks()
    prompt = blocks.take(3)
    documents = [prompt + blocks.take(rng.randint(2, 16)) for _ in range(max(20, capacity // 3))]
    picked = rng.choices(documents, cum_weights=zipf_weights(len(documents), 0.8), k=n_requests)
    return [document + blocks.take(rng.randint(1, 3)) for document in picked]


def popularity_shifts(rng: random.Random, n_requests: int, capacity: int) -> list[Chain]:
    """Documents by Zipf whose ranks are drawn again six times."""
    blocks, chains = Blocks(), list[Chain]()
    documents = [blocks.take(rng.randint(1, 12)) for _ in range(max(30, capacity // 3))]
    weights = zipf_weights(len(documents), 1.0)
    while len(chains) < n_requests:
        rng.shuffle(documents)
        chains += rng.choices(documents, cum_weights=weights, k=max(50, n_requests // 6))
    return chains[:n_requests]


def evaluations(rng: random.Random, n_requests: int, capacity: int) -> list[Chain]:
    """Batches of questions, each behind one few-shot prompt; some prompts come again."""
    blocks, prompts, chains = Blocks(), list[Chain](), list[Chain]()
    while len(chains) < n_requests:
        if prompts and rng.random() < 0.4:
            prompt = rng.choice(prompts)
        else:
            prompt = blocks.take(rng.randint(5, 60))
            prompts.append(prompt)
        batch = rng.randint(3, max(4, capacity // 30))
        chains += [prompt + blocks.take(rng.randint(1, 8)) for _ in range(batch)]
    return chains[:n_requests]


def chats_and_scans(rng: random.Random, n_requests: int, capacity: int) -> list[Chain]:
    """Sessions with time to think, and crawls through a corpus between them."""
    turns, blocks, chains, at = chats(rng, n_requests, capacity), Blocks(1 << 40), list[Chain](), 0
    while len(chains) < n_requests:
        n_turns = rng.randint(20, 200)
        chains += turns[at : at + n_turns]
        at += n_turns
        chains += [blocks.take(rng.randint(4, 20)) for _ in range(rng.randint(5, max(6, capacity // 15)))]
    return chains[:n_requests]


def hot_set_and_sweep(rng: random.Random, n_requests: int, capacity: int) -> list[Chain]:
    """A hot set by Zipf, and a corpus about as large as the capacity that is swept again and again."""
    blocks = Blocks()
    hot = [blocks.take(rng.randint(1, 8)) for _ in range(max(5, capacity // 16))]
    n_corpus = int(capacity * rng.uniform(0.7, 1.6)) // 10
    corpus = itertools.cycle([blocks.take(rng.randint(4, 16)) for _ in range(n_corpus + 1)])
    weights = zipf_weights(len(hot), 0.7)
    return [
        rng.choices(hot, cum_weights=weights)[0] if rng.random() < 0.5 else next(corpus)
        for _ in range(n_requests)
    ]


def one_shot_flood(rng: random.Random, n_requests: int, capacity: int) -> list[Chain]:
    """Three requests of four never come again; the others are of a working set that nearly fits."""
    blocks = Blocks()
    working = [blocks.take(rng.randint(1, 10)) for _ in range(max(4, capacity // 7))]
    return [
        rng.choice(working) if rng.random() < 0.25 else blocks.take(rng.randint(1, 14))
        for _ in range(n_requests)
    ]


_SINGLE: Sequence[Load] = (
    chats,
    tool_agents,
    long_thinkers,
    tenants,
    retrieval,
    popularity_shifts,
    evaluations,
    chats_and_scans,
    hot_set_and_sweep,
    one_shot_flood,
)


def blend(rng: random.Random, n_requests: int, capacity: int) -> list[Chain]:
    """Three of the others at once."""
    loads = [iter(kind(rng, n_requests, capacity // 2)) for kind in rng.sample(_SINGLE, 3)]
    return [_moved(next(loads[at]), at) for at in rng.choices(range(3), k=n_requests)]


def phases(rng: random.Random, n_requests: int, capacity: int) -> list[Chain]:
    """Four of the others, one after another."""
    kinds = enumerate(rng.sample(_SINGLE, 4))
    return [_moved(c, at) for at, kind in kinds for c in kind(rng, n_requests // 4, capacity)]


def _moved(chain: Chain, where: int) -> Chain:
    return tuple(block + (where << 45) for block in chain)


WORKLOADS: dict[str, Load] = {load.__name__: load for load in (*_SINGLE, blend, phases)}
