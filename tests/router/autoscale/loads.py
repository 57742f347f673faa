"""Made fleets for the tests of autoscaling."""

from __future__ import annotations

from random import Random
from typing import Any

from hypothesis import strategies as st

from libs.common.cluster.worker_record import Role
from services.router.autoscale.types import WorkerLoad
from slipstream.v1 import worker_pb2

JOBS = ("jobs_waiting", "jobs_running", "jobs_allowed")
# Fields of a report whose rise is more load.
COUNTS = (
    "requests_running",
    "requests_waiting",
    "requests_waiting_decode",
    "prefill_tokens_in_flight",
    "requests_unplaced",
    *JOBS,
)
RATES = ("drafts_missed_per_s", "evicted_wanted_bytes_per_s", "event_loop_delay_ms", "decode_step_ms")


def worker(role: Role, number: int = 0, **fields: Any) -> WorkerLoad:
    return WorkerLoad(role, f"{role}-{number}", worker_pb2.LoadReport(**fields), 64)


def tier(role: Role, n: int, **fields: Any) -> list[WorkerLoad]:
    return [worker(role, number, **fields) for number in range(n)]


def _report(random: Random) -> worker_pb2.LoadReport:
    due = random.choice([0.0, random.uniform(0, 1000)])
    jobs: dict[str, Any] = {name: random.choice([0, random.randint(0, 100)]) for name in JOBS}
    return worker_pb2.LoadReport(
        requests_running=random.choice([0, 1, 2, 100]),
        requests_waiting=random.choice([0, 1, 100]),
        requests_waiting_decode=random.choice([0, 1, 100]),
        requests_allowed=random.choice([0, 4, 256]),
        requests_admitted=random.choice([0, 4, 100]),
        prefill_tokens_in_flight=random.choice([0, random.randint(0, 10**7)]),
        requests_unplaced=random.choice([0, 0, 3]),
        **jobs,
        blocks_held=random.choice([0, random.randint(0, 1000)]),
        blocks_free=random.choice([0, random.randint(0, 1000)]),
        prefill_tokens_per_s=random.choice([0.0, 100.0, 5e4]),
        decode_step_ms=random.choice([0.0, random.uniform(0, 500)]),
        busy_share=random.choice([0.0, 1.0, random.random()]),
        drafts_due_per_s=due,
        drafts_missed_per_s=due * random.random(),
        evicted_wanted_bytes_per_s=random.choice([0.0, random.uniform(0, 1e10)]),
        event_loop_delay_ms=random.choice([0.0, random.uniform(0, 1000)]),
        draining=random.random() < 0.2,
    )


def _fleet(seed: int) -> list[WorkerLoad]:
    random = Random(seed)
    return [
        WorkerLoad(
            role,
            f"{role}-{number}",
            None if random.random() < 0.2 else _report(random),
            random.choice([0, 8, 256]),
        )
        for role in Role
        for number in range(random.randint(0, 4))
    ]


SEEDS = st.integers(0, 2**32)
# From a seed: to draw each field by itself takes a hundred times as long.
FLEETS = SEEDS.map(_fleet)


def more_load(fleet: list[WorkerLoad], seed: int) -> list[WorkerLoad]:
    """The same fleet with more to do, in any of its processes and signals."""
    random = Random(seed)
    loads = []
    for each in fleet:
        if each.report is None:
            loads.append(each)
            continue
        report = worker_pb2.LoadReport()
        report.CopyFrom(each.report)
        for name in COUNTS:
            setattr(report, name, getattr(report, name) + random.choice([0, random.randint(0, 1000)]))
        for name in RATES:
            more = getattr(report, name) * random.uniform(1, 10) + random.uniform(0, 100)
            setattr(report, name, random.choice([getattr(report, name), more]))
        report.busy_share = min(report.busy_share + random.choice([0.0, random.random()]), 1.0)
        pages = random.randint(0, report.blocks_free)
        report.blocks_held, report.blocks_free = report.blocks_held + pages, report.blocks_free - pages
        loads.append(WorkerLoad(each.role, each.instance, report, each.max_sequences))
    return loads
