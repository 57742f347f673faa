"""Made fleets for the tests of autoscaling."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from libs.common.cluster.worker_record import Role
from services.router.autoscale.types import WorkerLoad
from slipstream.v1 import worker_pb2

# Each signal, and the fields of a report whose rise is more load.
COUNTS = ("requests_running", "requests_waiting", "prefill_tokens_in_flight", "requests_unplaced")
SHARES = ("busy_share",)
RATES = ("drafts_missed_per_s", "evicted_wanted_bytes_per_s", "event_loop_delay_ms", "decode_step_ms")


def worker(role: Role, number: int = 0, **fields: Any) -> WorkerLoad:
    return WorkerLoad(role, f"{role}-{number}", worker_pb2.LoadReport(**fields), 64)


def tier(role: Role, n: int, **fields: Any) -> list[WorkerLoad]:
    return [worker(role, number, **fields) for number in range(n)]


@st.composite
def reports(draw: st.DrawFn) -> worker_pb2.LoadReport:
    held, free = draw(st.integers(0, 1000)), draw(st.integers(0, 1000))
    due = draw(st.floats(0, 1000))
    return worker_pb2.LoadReport(
        requests_running=draw(st.integers(0, 100)),
        requests_waiting=draw(st.integers(0, 100)),
        prefill_tokens_in_flight=draw(st.integers(0, 10**7)),
        requests_unplaced=draw(st.integers(0, 3)),
        blocks_held=held,
        blocks_free=free,
        prefill_tokens_per_s=draw(st.sampled_from([0.0, 100.0, 5e4])),
        decode_step_ms=draw(st.floats(0, 500)),
        busy_share=draw(st.floats(0, 1)),
        drafts_due_per_s=due,
        drafts_missed_per_s=due * draw(st.floats(0, 1)),
        evicted_wanted_bytes_per_s=draw(st.floats(0, 1e10)),
        event_loop_delay_ms=draw(st.floats(0, 1000)),
        draining=draw(st.booleans()),
    )


@st.composite
def fleets(draw: st.DrawFn) -> list[WorkerLoad]:
    loads: list[WorkerLoad] = []
    for role in Role:
        for number in range(draw(st.integers(0, 4))):
            report = draw(st.one_of(st.none(), reports(), reports(), reports()))
            places = draw(st.sampled_from([0, 8, 256]))
            loads.append(WorkerLoad(role, f"{role}-{number}", report, places))
    return loads


@st.composite
def more_load(draw: st.DrawFn, fleet: list[WorkerLoad]) -> list[WorkerLoad]:
    """The same fleet with more to do, in any of its processes and signals."""
    loads = []
    for each in fleet:
        if each.report is None:
            loads.append(each)
            continue
        report = worker_pb2.LoadReport()
        report.CopyFrom(each.report)
        for name in COUNTS:
            setattr(report, name, getattr(report, name) + draw(st.integers(0, 1000)))
        for name in SHARES:
            setattr(report, name, min(getattr(report, name) + draw(st.floats(0, 1)), 1.0))
        for name in RATES:
            setattr(report, name, getattr(report, name) * draw(st.floats(1, 10)) + draw(st.floats(0, 100)))
        pages = draw(st.integers(0, report.blocks_free))
        report.blocks_held, report.blocks_free = report.blocks_held + pages, report.blocks_free - pages
        loads.append(WorkerLoad(each.role, each.instance, report, each.max_sequences))
    return loads
