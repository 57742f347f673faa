"""What the cache page makes of the counters of kvstore nodes and of requests."""

from __future__ import annotations

import math

import aiohttp
import pytest

from libs.common.cluster.worker_record import Role, Worker
from services.router.console.cache_view import cached_by_source, known_totals, store_tiers
from services.router.server import RouterServer
from slipstream.v1 import common_pb2, worker_pb2
from tests.router.support.fake_cluster import FakeCluster
from tests.router.support.fake_workers import BLOCK_TOKENS

COUNTERS = {
    "slipstream_kvstore_blocks_dram": 10,
    "slipstream_kvstore_bytes_dram": 10_240,
    "slipstream_kvstore_hits_dram_total": 7,
    "slipstream_kvstore_hits_nvme_total": 3,
    "slipstream_kvstore_evictions_total": 20,
    "slipstream_kvstore_evicted_rerequested_total": 5,
    "slipstream_kvstore_evicted_rerequested_nvme_total": 1,
}


FALSE = [math.nan, math.inf, -math.inf, -1.0, 1e308]


@pytest.mark.parametrize("figure", FALSE)
def test_a_false_figure_of_a_node_counts_as_none_and_other_names_not_at_all(figure: float) -> None:
    stated = dict.fromkeys([*COUNTERS, "slipstream_kvstore_made_up"], figure)
    totals = dict(known_totals(stated))
    assert set(totals.values()) == {0} and "slipstream_kvstore_made_up" not in totals
    assert COUNTERS.items() <= dict(known_totals(COUNTERS)).items()
    assert store_tiers(totals, [node(dram_bytes=1)])[0]["blocks_used"] == 0


def node(**capacity: int) -> Worker:
    return Worker(Role.KVSTORE, "kvstore-0", "127.0.0.1:1", "i", capacity=capacity)


def test_totals_follow_from_the_announced_bytes_and_the_mean_block() -> None:
    memory, pool, disk = store_tiers(COUNTERS, [node(dram_bytes=20_480), node(dram_bytes=20_480)])
    assert memory == {
        "tier": "memory",
        "blocks_total": 40,
        "blocks_used": 10,
        "hits_blocks": 7,
        "bytes_used": 10_240,
        "bytes_total": 40_960,
    }
    assert (pool["blocks_total"], pool["hits_blocks"], pool["bytes_total"]) == (None, 0, None)
    assert (disk["blocks_total"], disk["hits_blocks"]) == (None, 3)


def test_the_stores_are_one_source_and_three() -> None:
    found = cached_by_source({"prefill": 40, "decode": 24, "peer": 1, "dram": 2, "nvme": 3, "pool": 4})
    assert found == {"local": 64, "peer": 1, "dram": 2, "nvme": 3, "pool": 4, "kvstore": 9}


async def test_the_page_has_the_policies_and_the_evictions_of_the_nodes(
    router: RouterServer, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = cluster.kvstore
    monkeypatch.setattr(store.process, "status_counters", lambda: COUNTERS)
    memory = [worker_pb2.EVICTION_POLICY_S3_FIFO, worker_pb2.EVICTION_POLICY_HIT_DENSITY, 99]
    evictions = [
        worker_pb2.TierEviction(tier=common_pb2.CACHE_TIER_DRAM, policies=memory),  # type: ignore[arg-type]
        worker_pb2.TierEviction(tier=common_pb2.CACHE_TIER_NVME),
        worker_pb2.TierEviction(tier=77, policies=[worker_pb2.EVICTION_POLICY_LRU]),  # type: ignore[arg-type]
    ]
    monkeypatch.setattr(store.process, "evictions", lambda: evictions)
    async with (
        aiohttp.ClientSession(f"http://{router.admin_http_endpoint}") as http,
        http.get("/console/api/cache") as answer,
    ):
        page = await answer.json()
    # 99 and 77 are of a later contract.
    assert page["policies"] == [
        {"instance": "kvstore-0", "tier": "memory", "policy": "S3-FIFO, hit density, unknown"},
        {"instance": "kvstore-0", "tier": "unknown", "policy": "LRU"},
    ]
    assert (page["evicted_blocks"], page["evicted_wanted_blocks"]) == (20, 6)
    tiers = {tier["tier"]: tier for tier in page["tiers"]}
    assert (tiers["memory"]["blocks_used"], tiers["disk"]["hits_blocks"]) == (10, 3)


async def test_a_kvstore_that_does_not_answer_counts_nothing(
    router: RouterServer, cluster: FakeCluster
) -> None:
    await cluster.kvstore.kill()
    async with (
        aiohttp.ClientSession(f"http://{router.admin_http_endpoint}") as http,
        http.get("/console/api/cache") as answer,
    ):
        page = await answer.json()
    assert page["policies"] == [] and page["evicted_blocks"] == 0


async def test_the_pages_of_each_role_have_their_own_hits(router: RouterServer, cluster: FakeCluster) -> None:
    router.recorder.cached_tokens.update({"prefill": 3 * BLOCK_TOKENS, "decode": 5 * BLOCK_TOKENS})
    async with (
        aiohttp.ClientSession(f"http://{router.admin_http_endpoint}") as http,
        http.get("/console/api/cache") as answer,
    ):
        tiers = {tier["tier"]: tier for tier in (await answer.json())["tiers"]}
    assert (tiers["prefill"]["hits_blocks"], tiers["decode"]["hits_blocks"]) == (3, 5)
