"""The fleet as placement and readiness see it, by the records and reports of its workers."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator

import pytest

from libs.common.cluster.discovery import Fleet, InMemoryDiscovery
from libs.common.cluster.worker_record import FleetSnapshot, Role, Worker
from services.router.workers.connection import WorkerConnection
from services.router.workers.fleet import RouterFleet
from slipstream.v1 import common_pb2, worker_pb2


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def fleet(clock: Clock) -> AsyncIterator[RouterFleet]:
    fleet = RouterFleet(Fleet(InMemoryDiscovery()), clock=clock, fits=lambda _: True)
    capacity = {"max_batch": 8, "block_tokens": 32, "block_bytes": 512}
    fleet._reconcile(
        FleetSnapshot.of(
            Worker(role, f"{role}-0", "127.0.0.1:1", "i", capacity=capacity)
            for role in (Role.PREFILL, Role.DECODE)
        )
    )
    yield fleet
    await fleet.close()
    assert not fleet.can_serve and not [*fleet.links()]


def report(link: WorkerConnection, model: str = "", **figures: float) -> None:
    """Let the worker be of a model and report these figures."""
    link.fingerprint = common_pb2.Fingerprint(digest=b"d" + model.encode(), model=model)
    link._apply(worker_pb2.LoadReport(sequence=link._report.sequence + 1, **figures))  # type: ignore[arg-type]


async def test_placement_gets_the_figures_of_records_and_reports(fleet: RouterFleet) -> None:
    decode, prefill = fleet.links()
    report(prefill, prefill_tokens_in_flight=70, requests_waiting=2, prefill_tokens_per_s=900.0)
    report(decode, blocks_free=3, blocks_cached=4, prefill_tokens_in_flight=5, decode_tokens_in_flight=60)
    seen = fleet.loads()
    [one] = seen.prefill
    assert (one.queued_tokens, one.queued_requests, one.refused) == (70, 2, "")
    [other] = seen.decode
    assert (other.free_blocks, other.queued_tokens, other.context_tokens) == (7, 5, 60)
    assert (other.max_sequences, other.block_tokens, other.block_bytes) == (8, 32, 512)


async def test_a_fleet_is_ready_with_both_tiers_of_one_fingerprint(fleet: RouterFleet) -> None:
    decode, prefill = fleet.links()
    assert not fleet.ready
    report(prefill, "a")
    assert not fleet.ready and not fleet.can_serve
    report(decode, "b")
    assert not fleet.ready and fleet.can_serve
    report(prefill, "b", draining=True)
    assert not fleet.ready
    report(prefill, "b")
    assert fleet.ready


async def test_an_outage_lasts_since_the_last_decode_worker_drained(fleet: RouterFleet, clock: Clock) -> None:
    decode, _ = fleet.links()
    assert fleet.outage_s == math.inf
    report(decode)
    clock.now_s += 3
    assert fleet.outage_s == 0
    report(decode, draining=True)
    clock.now_s += 2
    assert fleet.outage_s == 2
    fleet.readiness_changed()
    assert fleet.outage_s == 2
