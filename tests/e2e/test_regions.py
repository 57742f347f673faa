"""Two regions in one cluster, real processes: a router places in its own region, goes to another one for a
session whose KV is there, and spills over when its own is full.

eu has the workers whose names end in 0, us those in 1; each router is at home in one of them.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from libs.common.worker_record import Role
from slipstream.async_client import AsyncClient
from slipstream.client import Client
from slipstream.replies import Trail
from tests.support.fake_engines import fake_engine_config
from tests.support.local_cluster import LocalCluster, until

REGIONS = ("eu", "us")
AWAY_MS = 200.0
# To compute a prompt of 2,000 tokens takes a second: worth the way to where it is held.
PREFILL_PACE_S, DECODE_PACE_S = 0.0005, 0.002
MAX_BATCH = 4


def bent() -> dict[str, dict[str, list[str]]]:
    found: dict[str, dict[str, list[str]]] = {}
    for number, region in enumerate(REGIONS):
        at_home = ",".join(f"{name}={0 if name == region else AWAY_MS}" for name in REGIONS)
        found[f"router-{number}"] = {"arguments": ["--region-ms", at_home]}
        found[f"kvstore-{number}"] = {"arguments": ["--region", region]}
        for role, pace_s in ((Role.PREFILL, PREFILL_PACE_S), (Role.DECODE, DECODE_PACE_S)):
            arguments = ["--region", region, "--fake-pace-s", str(pace_s), "--max-batch", str(MAX_BATCH)]
            found[f"{role}-{number}"] = {"arguments": arguments}
    return found


class Site:
    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        self.here = cluster.workers["router-0"]
        self.there = cluster.workers["router-1"]

    def chat(self, router: str, text: str, session: str, *, tokens: int = 4) -> tuple[Trail, int]:
        """Where it ran, and how many of its prompt tokens were cached."""
        with Client(router, timeout_s=60) as client:
            reply = client.chat([{"role": "user", "content": text}], session=session, **_options(tokens))
        assert reply.trail is not None and reply.usage is not None
        self.cluster.assert_idle()
        return reply.trail, reply.usage.cached_tokens


def _options(tokens: int) -> dict[str, Any]:
    return {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True}


def _words(name: str, count: int) -> str:
    return " ".join(f"{name}-{i}" for i in range(count))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    run_dir = tmp_path_factory.mktemp("regions")
    (run_dir / "bent.json").write_text(json.dumps(bent()))
    modules = dict.fromkeys(Role, "tests.support.bent_service")
    config = fake_engine_config(run_dir, routers=2, kvstores=2, drafters=0, modules=modules)
    with LocalCluster(config) as cluster:
        site = Site(cluster)
        for number in range(3):  # the routers learn what prompts cost
            for router in (site.here, site.there):
                site.chat(router, _words(f"warm{number}", 80), f"warm-{number}")
        yield site


def test_new_sessions_stay_in_their_routers_region(site: Site) -> None:
    for router, number in ((site.here, 0), (site.there, 1)):
        for count in (20, 60):
            trail, _ = site.chat(router, _words(f"new{number}{count}", count), f"new-{number}-{count}")
            assert (trail.prefill_worker or trail.decode_worker)[-1] == str(number), trail.reason
            assert trail.decode_worker == f"decode-{number}"
            assert trail.kvstore in ("", f"kvstore-{number}")


def test_a_session_is_continued_where_its_kv_is(site: Site) -> None:
    """From a router that is far from there; the way costs less than to compute it anew."""
    text = _words("held", 350)
    first, _ = site.chat(site.here, text, "held")
    assert first.decode_worker == "decode-0"

    def continued() -> bool:
        """As soon as the other router has heard of it."""
        trail, cached = site.chat(site.there, text + " and so on", "held")
        return trail.decode_worker == "decode-0" and cached > 500

    until(continued, timeout_s=30, what="the session is continued in eu")
    # What is short is computed anew close by.
    short, _ = site.chat(site.here, _words("short", 4), "short")
    assert short.decode_worker == "decode-0"
    again, _ = site.chat(site.there, _words("short", 4), "short")
    assert again.decode_worker == "decode-1"


def test_a_full_region_spills_over_and_is_used_again(site: Site) -> None:
    async def flood() -> list[Trail]:
        async with AsyncClient(site.here, timeout_s=60) as client:

            async def one(number: int) -> Trail:
                await asyncio.sleep(0.15 * number)
                messages = [{"role": "user", "content": _words(f"flood{number}", 10)}]
                reply = await client.chat(messages, session=f"flood-{number}", **_options(250))
                assert reply.trail is not None
                return reply.trail

            return list(await asyncio.gather(*(one(number) for number in range(3 * MAX_BATCH))))

    trails: list[Trail] = site.cluster.call(flood(), timeout_s=120)
    where = Counter(trail.decode_worker for trail in trails)
    assert trails[0].decode_worker == "decode-0"
    assert where["decode-0"] >= MAX_BATCH, where
    assert where["decode-1"] >= 2, where
    for trail in trails:  # KV does not travel between regions
        assert trail.prefill_worker[-1:] in ("", trail.decode_worker[-1])
    site.cluster.assert_idle()
    after, _ = site.chat(site.here, _words("after", 40), "after")
    assert after.decode_worker == "decode-0"
