"""The series of a router that begin at 0, and the metrics of its fleet.

Those of the fleet are measured when they are read: from load reports, never by a call.
"""

from __future__ import annotations

from libs.common.cluster.worker_record import Role
from libs.common.telemetry.counters import Counters
from services.router.jobs.types import DeliveryOutcome, JobState
from services.router.workers.fleet import RouterFleet

_WORKERS = (Role.PREFILL, Role.DECODE, Role.KVSTORE, Role.DRAFTER)
# Finish reasons that a client sees.
_FINISHES = ("stop", "length", "tool_calls")


def begin_series(counters: Counters) -> None:
    """Begin at 0 the series of usual finish reasons, of the ends of jobs, and of deliveries of webhooks.

    `increase` of Prometheus sees no first increase of a series that begins with it.
    """
    for reason in _FINISHES:
        counters.add("slipstream_requests_finished_total", 0, (reason,))
    for state in JobState:
        if state.ended:
            counters.add("slipstream_jobs_ended_total", 0, (state.value,))
    for outcome in DeliveryOutcome:
        counters.add("slipstream_webhooks_total", 0, (outcome.value,))


def measure_fleet(counters: Counters, fleet: RouterFleet) -> None:
    """Set the gauges of the fleet that this router sees."""
    for role in _WORKERS:
        n_ready = sum(link.ready for link in fleet.links_of(role))
        counters.set("slipstream_workers", n_ready, (role.value,))
    held = blocks = block_tokens = 0
    for link in fleet.links_of(Role.DECODE):
        report = link.report
        if link.ready and report is not None:
            held += report.blocks_held
            blocks += report.blocks_held + report.blocks_free + report.blocks_cached
            block_tokens = link.worker.capacity.get("block_tokens", block_tokens)
    counters.set("slipstream_decode_kv_occupancy_ratio", held / blocks if blocks else 0.0)
    counters.replace("slipstream_kv_cache_info", {(str(block_tokens), str(blocks)): 1} if blocks else {})
