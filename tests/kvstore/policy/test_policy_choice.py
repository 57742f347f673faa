"""The tier lacks little to the best of its candidate policies, whichever that is."""

from __future__ import annotations

import functools
import random

import pytest

from bench.cache.baselines import Arc, Cache, Lru, S3Fifo
from bench.cache.changing import CHANGING
from bench.cache.compare import HitDensity
from bench.cache.policy import Production
from bench.cache.traces import LOADS, Chain
from services.kvstore.policy.adaptive import POLICY_NAMES
from slipstream.enum_names import EVICTION_POLICIES
from slipstream.v1 import worker_pb2

CAPACITY = 100
# What finding the best policy may cost, in blocks: warm-up and changes, whatever the length of the load.
LOST_BLOCKS = CAPACITY
LOST_TO_LRU_BLOCKS = CAPACITY // 2
# On `nightly` the best policy alternates with day and night, and each turn costs.
NAMES = sorted({*LOADS, *CHANGING} - {"nightly"})


@functools.cache
def rows(
    name: str, seed: int, n_requests: int, *, capacity: int = CAPACITY, scale_blocks: int = CAPACITY
) -> tuple[list[Chain], dict[str, int], int]:
    """A load, the hits of each policy on it, and those of the tier."""
    chains = (LOADS | CHANGING)[name](random.Random(f"{name}{seed}"), n_requests, scale_blocks)
    caches: dict[str, Cache] = {
        "lru": Lru(capacity),
        "arc": Arc(capacity),
        "s3fifo": S3Fifo(capacity),
        "hit_density": HitDensity(capacity),
    }
    hits = {column: sum(map(cache.serve, chains)) for column, cache in caches.items()}
    return chains, hits, sum(map(Production(capacity).serve, chains))


@pytest.mark.parametrize("name", NAMES)
def test_the_tier_lacks_a_bounded_number_of_hits_to_the_best_policy(name: str) -> None:
    chains, hits, tier = rows(name, 5, 1200)
    blocks = sum(map(len, chains))
    assert tier >= max(hits.values()) - 0.003 * blocks - LOST_BLOCKS, hits
    assert tier >= hits["lru"] - 0.001 * blocks - LOST_TO_LRU_BLOCKS, hits


@pytest.mark.parametrize(
    ("name", "n_requests", "lost_blocks", "worse"),
    [
        ("zipf_and_scan", 3000, 250, {"lru", "hit_density"}),
        ("recent", 6000, 100, {"arc", "s3fifo", "hit_density"}),
    ],
)
def test_the_tier_finds_the_best_policy_where_others_lose_much(
    name: str, n_requests: int, lost_blocks: int, worse: set[str]
) -> None:
    """Whichever policy a tier always followed, it would lose more on one of these loads."""
    _, hits, tier = rows(name, 5, n_requests, capacity=300, scale_blocks=1000)
    best = max(hits.values())
    assert worse == {column for column, found in hits.items() if found < best - lost_blocks}, hits
    assert tier >= best - lost_blocks, hits


@pytest.mark.parametrize("name", ["loop", "long_loop"])
def test_a_loop_beyond_the_capacity_loses_nothing_to_the_best_policy(name: str) -> None:
    """A tier that first holds what LRU holds loses it when it changes."""
    chains, hits, tier = rows(name, 5, 1200)
    assert hits["hit_density"] > hits["lru"] + CAPACITY
    assert tier >= hits["hit_density"] - 0.003 * sum(map(len, chains)) - CAPACITY // 5


def test_every_policy_of_memory_is_one_of_the_contract() -> None:
    values = [EVICTION_POLICIES.value(name) for name in POLICY_NAMES]
    disks = worker_pb2.EVICTION_POLICY_EXPECTED_REUSE
    assert sorted([*values, disks]) == sorted(filter(None, worker_pb2.EvictionPolicy.values()))
    assert [EVICTION_POLICIES.name(value) for value in values] == list(POLICY_NAMES)
    with pytest.raises(KeyError):
        EVICTION_POLICIES.value("unknown")
