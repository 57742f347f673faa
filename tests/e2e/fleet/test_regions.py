"""Two regions in one cluster of real processes: a router places in its region, in another one for a session
whose KV is there, and spills over when its region is full.

Workers whose names end in 0 are in eu, those in 1 in us; each region has one of the routers.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from libs.common.cluster.worker_record import Role
from slipstream.async_client import AsyncClient
from slipstream.client import Client
from slipstream.replies import Reply, RequestStats
from tests.support.clusters.disturbance import DECODERS
from tests.support.clusters.fake_engines import fake_engine_config
from tests.support.clusters.local_cluster import REQUEST_S, LocalCluster, until
from tests.support.fixture_dirs import lasting_dir

REGIONS = ("eu", "us")
DISTANCE_MS = 200.0
# Computing a prompt of 2,000 tokens takes a second, more than the round trip to the other region.
PREFILL_PACE_S, DECODE_PACE_S = 0.0005, 0.002
MAX_BATCH = 4


def changes() -> dict[str, dict[str, list[str]]]:
    found: dict[str, dict[str, list[str]]] = {}
    for number, region in enumerate(REGIONS):
        at_home = ",".join(f"{name}={0 if name == region else DISTANCE_MS}" for name in REGIONS)
        found[f"router-{number}"] = {"arguments": ["--region-ms", at_home]}
        found[f"kvstore-{number}"] = {"arguments": ["--region", region]}
        for role, pace_s in ((Role.PREFILL, PREFILL_PACE_S), (Role.DECODE, DECODE_PACE_S)):
            arguments = ["--region", region, "--fake-pace-s", str(pace_s), "--max-batch", str(MAX_BATCH)]
            found[f"{role}-{number}"] = {"arguments": arguments}
    return found


class Site:
    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        self.here = cluster.routers[0]
        self.there = cluster.routers[1]

    def chat(self, router: str, text: str, session: str, *, tokens: int = 4) -> tuple[RequestStats, int]:
        """The region of a session's request, and its cached prompt tokens."""
        with Client(router, timeout_s=REQUEST_S) as client:
            reply = client.chat([{"role": "user", "content": text}], session=session, **_options(tokens))
        assert reply.stats is not None and reply.usage is not None
        self.cluster.assert_idle()
        return reply.stats, reply.usage.cached_tokens


def _options(tokens: int) -> dict[str, Any]:
    return {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True}


def _words(name: str, count: int) -> str:
    return " ".join(f"{name}-{i}" for i in range(count))


@pytest.fixture(scope="module")
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    with lasting_dir(request, "regions") as run_dir:
        (run_dir / "altered.json").write_text(json.dumps(changes()))
        modules = dict.fromkeys(Role, "tests.support.clusters.altered_service")
        config = fake_engine_config(run_dir, routers=2, kvstores=2, drafters=0, modules=modules)
        with LocalCluster(config) as cluster:
            site = Site(cluster)
            for number in range(3):  # so that the routers estimate the cost of a prompt
                for router in (site.here, site.there):
                    site.chat(router, _words(f"warm{number}", 80), f"warm-{number}")
            yield site


def test_new_sessions_stay_in_their_routers_region(site: Site) -> None:
    """Placement compares predicted times, and a stalled worker may lose against the other region, so the test
    tries several sessions."""
    fresh = itertools.count()

    def stays(number: int, count: int) -> bool:
        name = f"new{next(fresh)}"
        stats, _ = site.chat((site.here, site.there)[number], _words(name, count), name)
        at_home = stats.decode_worker == f"decode-{number}"
        assert stats.prefill_worker[-1:] in ("", stats.decode_worker[-1]), stats.reason
        assert stats.kvstore[-1:] in ("", stats.decode_worker[-1])
        return at_home

    for number in (0, 1):
        for count in (20, 60):
            until(lambda n=number, c=count: stays(n, c), what="a session stays at home")  # type: ignore[misc]


def test_a_session_is_continued_where_its_kv_is(site: Site) -> None:
    """A router of the other region continues it: the round trip costs less than computing the prompt."""
    fresh = itertools.count()

    def continued(words: int, region: int) -> bool:
        """Whether a session from eu continues in the expected region, when the other router knows its KV."""
        name = f"held{next(fresh)}"
        first, _ = site.chat(site.here, _words(name, words), name)
        second, cached = site.chat(site.there, _words(name, words) + " and so on", name)
        begun_in_eu = first.decode_worker == "decode-0"
        cached_as_expected = cached > 500 if region == 0 else cached < 64
        return begun_in_eu and second.decode_worker == f"decode-{region}" and cached_as_expected

    until(lambda: continued(350, 0), what="the session is continued in eu")
    # A short prompt is computed again in the router's region.
    until(lambda: continued(4, 1), what="the short session is continued in us")


def test_a_full_region_spills_over_and_is_used_again(site: Site) -> None:
    """Requests arrive and none ends, until the other region runs some of them."""
    cluster = site.cluster

    def spilled() -> bool:
        here, there = (cluster.sequences(name) for name in DECODERS)
        return here >= MAX_BATCH and there >= 2

    async def flood() -> list[RequestStats]:
        async with AsyncClient(site.here, timeout_s=REQUEST_S) as client:

            async def one(number: int) -> RequestStats:
                messages = [{"role": "user", "content": _words(f"flood{number}", 10)}]
                reply: Reply = await client.chat(messages, session=f"flood-{number}", **_options(250))
                assert reply.stats is not None
                return reply.stats

            asked: list[asyncio.Task[RequestStats]] = []
            with cluster.gate.held(*DECODERS, from_token=100):
                while not await asyncio.to_thread(spilled):
                    assert len(asked) < 10 * MAX_BATCH, "nothing spills over"
                    asked.append(asyncio.create_task(one(len(asked))))
                    await asyncio.sleep(0.15)
            return list(await asyncio.gather(*asked))

    all_stats: list[RequestStats] = cluster.call(flood(), timeout_s=2 * REQUEST_S)
    where = Counter(stats.decode_worker for stats in all_stats)
    assert where["decode-0"] >= MAX_BATCH, where
    assert where["decode-1"] >= 2, where
    for stats in all_stats:  # KV does not travel between regions
        assert stats.prefill_worker[-1:] in ("", stats.decode_worker[-1])
    cluster.assert_idle()
    fresh = itertools.count()

    def at_home() -> bool:
        name = f"after{next(fresh)}"
        return site.chat(site.here, _words(name, 40), name)[0].decode_worker == "decode-0"

    until(at_home, what="the region is used again")
