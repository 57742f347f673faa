"""Many more requests than a cluster of real processes can serve: the router refuses the rest at once.

No worker computes for a refused request, urgent requests are served, and all ledgers are empty afterwards.
The decode engines are held until the refusals have arrived. `python -m bench.overload` measures goodput and
refusal times; tests/router/admission/test_overload.py has both on a virtual clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from bench.overload.__main__ import PLACES, overload_config
from bench.overload.load import Outcomes, OverloadClient, RequestShape
from libs.common import service_bounds
from libs.common.cluster.worker_record import Role
from tests.support.clusters.disturbance import DECODERS
from tests.support.clusters.local_cluster import REQUEST_S, LocalCluster, until
from tests.support.fixture_dirs import lasting_dir

PACE_S = 0.0005
HELD_FROM = 4
MAX_WAITING = service_bounds.MAX_WAITING_REQUESTS[0]
AT_ONCE_PER_S = 1e6
URGENT = 8


class Site:
    """An overloaded cluster and its clients."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster

    def flood(self, requests: int, *, decided: Callable[[], bool], priorities: tuple[str, ...]) -> Outcomes:
        """Send so many requests at once; no stream ends before `decided` is true."""
        shape = RequestShape(REQUEST_S, output_tokens=6, http_every=0, priorities=priorities)
        with self.cluster.gate.held(*DECODERS, from_token=HELD_FROM) as gate:

            async def load() -> Outcomes:
                async with OverloadClient(self.cluster.grpc, self.cluster.http) as client:
                    asking = asyncio.create_task(
                        client.window(shape, rate_per_s=AT_ONCE_PER_S, requests=requests, seed=requests)
                    )
                    await asyncio.to_thread(
                        until, decided, what="every request is admitted, queued or refused"
                    )
                    await client.refused_over_http()
                    gate.open()
                    return await asking

            outcomes: Outcomes = self.cluster.call(load(), timeout_s=2 * REQUEST_S)
        assert outcomes.problems == []
        assert outcomes.late == 0
        assert outcomes.good + outcomes.refused == outcomes.offered
        self.cluster.assert_idle()
        return outcomes

    def counts(self) -> dict[str, float]:
        """The router's counters and gauges."""
        return dict(self.cluster.status("router-0").counters)


@pytest.fixture(scope="module")
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    modules = dict.fromkeys(Role, "tests.support.clusters.altered_service")
    with lasting_dir(request, "overload") as run_dir:
        config = overload_config(run_dir, decode_pace_s=PACE_S)
        with LocalCluster(replace(config, modules=modules)) as cluster:
            yield Site(cluster)


def test_a_flood_is_refused_at_once_and_costs_the_workers_nothing(site: Site) -> None:
    offered = 16 * PLACES
    least_refused = offered - PLACES - MAX_WAITING
    assert least_refused > PLACES
    before = site.counts()

    def decided() -> bool:
        now = site.counts()
        name = "slipstream_admission_rejected_total"
        return now.get(name, 0) - before.get(name, 0) >= least_refused

    flood = site.flood(offered, decided=decided, priorities=("interactive",))
    assert flood.refused >= least_refused
    assert flood.good >= PLACES
    # Every request that began was served to its end.
    made = site.counts()["slipstream_attempts_total"] - before.get("slipstream_attempts_total", 0)
    assert made == flood.attempts


def test_urgent_requests_come_through_a_flood_of_others(site: Site) -> None:
    """They arrive last, behind many queued requests, and end before most of these."""
    flood_size = 6 * PLACES
    taken = "slipstream_requests_total"
    before = site.counts().get(taken, 0)

    def decided() -> bool:
        return site.counts().get(taken, 0) - before >= flood_size + URGENT

    priorities = ("bulk",) * flood_size + ("interactive",) * URGENT
    flood = site.flood(flood_size + URGENT, decided=decided, priorities=priorities)
    assert flood.priorities["interactive"] == URGENT
    last = len(flood.good_order) - flood.good_order[::-1].index("interactive")
    waited = flood.priorities["bulk"] - PLACES
    assert len(flood.good_order) - last >= waited / 4
