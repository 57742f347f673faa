"""Ten times as many requests as the cluster can serve, in real processes: what it serves does not shrink,
the rest is told at once and in the right words, the urgent come through, and nothing is held afterwards."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import pytest

from bench.overload import PLACES, overload_config
from bench.overload_load import Outcomes, OverloadClient, Shape
from tests.support.local_cluster import LocalCluster

# Slow enough for a loaded machine to keep up with: workers that sleep bound the capacity, not the cores.
PACE_S = 0.008
SHAPE = Shape(deadline_s=6.0, output_tokens=16)


class Site:
    """A cluster and its clients."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        self._seed = 0
        self.calm, self.rate = self.closed(requests=2 * PLACES)

    def closed(self, *, requests: int) -> tuple[Outcomes, float]:
        """As many streams as run at once; (what came of them, good requests a second)."""
        return self._run(None, SHAPE, requests)

    def open(self, rate_per_s: float, *, requests: int, shape: Shape = SHAPE) -> tuple[Outcomes, float]:
        """Arrivals at this rate."""
        return self._run(rate_per_s, shape, requests)

    def _run(self, rate_per_s: float | None, shape: Shape, requests: int) -> tuple[Outcomes, float]:
        self._seed += 1

        async def load() -> Outcomes:
            async with OverloadClient(self.cluster.grpc, self.cluster.http) as client:
                if rate_per_s is None:
                    return await client.closed(shape, streams=PLACES, requests=requests, seed=self._seed)
                return await client.window(shape, rate_per_s=rate_per_s, requests=requests, seed=self._seed)

        began_s = time.monotonic()
        outcomes: Outcomes = self.cluster.call(load(), timeout_s=200)
        wall_s = time.monotonic() - began_s
        assert outcomes.problems == []
        assert outcomes.good + outcomes.refused + outcomes.late == outcomes.offered
        self.cluster.assert_idle()
        return outcomes, outcomes.good / wall_s


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    config = overload_config(tmp_path_factory.mktemp("overload"), decode_pace_s=PACE_S)
    with LocalCluster(config) as cluster:
        yield Site(cluster)


def test_ten_times_overload_refuses_the_rest_and_wastes_nothing(site: Site) -> None:
    calm, rate = site.calm, site.rate
    assert calm.good == calm.offered
    over, over_rate = site.open(10 * rate, requests=int(10 * rate * 2))
    assert over.refused > over.good
    # Told at once, but for those that had a fair chance; nobody waits for nothing until the deadline.
    prompt = sum(ms < SHAPE.deadline_s * 1e3 / 4 for ms in over.refused_after_ms)
    assert prompt >= 0.8 * over.refused
    # Work that was begun was finished in time: the measure that does not hang on this machine's load.
    assert over.late <= max(0.05 * over.good, 2)
    assert over.good >= calm.good / 4
    assert over_rate >= 0.5 * rate


def test_urgent_requests_come_through_a_flood_of_others(site: Site) -> None:
    rate = site.rate
    shape = Shape(SHAPE.deadline_s, SHAPE.output_tokens, priorities=("interactive", *["bulk"] * 24))
    flood, _ = site.open(10 * rate, requests=int(10 * rate * 2), shape=shape)
    urgent = -(-flood.offered // len(shape.priorities))
    assert flood.priorities["interactive"] >= urgent - 1
    assert flood.refused > flood.good


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_goodput_at_ten_times_is_that_of_the_peak(site: Site) -> None:
    """Five rounds in turn, 12 s each; medians."""
    _, capacity = site.closed(requests=10 * PLACES)
    rates: dict[float, list[float]] = {1.0: [], 1.5: [], 10.0: []}
    for _ in range(5):
        for load, seen in rates.items():
            seen.append(site.open(capacity * load, requests=int(capacity * load * 12))[1])
    goodput = {load: statistics.median(seen) for load, seen in rates.items()}
    print(f"good requests/s: {goodput}, closed loop {capacity:.2f}")
    assert goodput[10.0] >= 0.95 * max(goodput[1.0], goodput[1.5])
