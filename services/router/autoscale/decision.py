"""How many replicas each tier should have, computed from load reports alone. Pure.

The answer depends on nothing but the reports, so that every router gives the same one. A tier's load is the
largest of its signals, each in units of its target. A value times the number of replicas is what the tier as
a whole has to do. `ceil(replicas * value / target)` is the number that brings the value to its target.

A router of several processes is one replica. Values are means of processes, so one more replica is one with
as many processes as routers have now.

Queues say how late a tier is, and nothing while it keeps up. Two fleets, one idle and one about to be full,
both have none. So prefill workers, drafters and routers also count how busy they are. Requests that wait at a
router for its own limit count there, not at decode workers: more of those would let none begin. Draining
processes count for nothing. A process whose report is missing counts like the mean of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import median_low

from libs.common.cluster.worker_record import Role
from services.router.autoscale.types import Aims, AutoscalePolicy, Recommendation, Signal, WorkerLoad
from slipstream.v1 import worker_pb2

# Below this share of busy time late drafts and late timers have other causes than too few processes.
IDLE_SHARE = 0.25
# A step of so few sequences a decode worker is hardly shorter on a larger fleet: what is left of it does not
# depend on their number.
STEP_SEQUENCES = 4
# While no prefill worker has computed anything yet.
ASSUMED_PREFILL_TOKENS_PER_S = 5_000.0
# A worker is at most so many times as fast as its tier's median.
_MOST_RATES = 4
_MIB = 1 << 20

Reports = Sequence[worker_pb2.LoadReport]


def recommend(fleet: Sequence[WorkerLoad], role: Role, policy: AutoscalePolicy) -> Recommendation:
    """The recommendation for one tier."""
    present = [worker for worker in fleet if worker.report is None or not worker.report.draining]
    tier = [worker for worker in present if worker.role is role]
    active = is_active(present, role)
    if not any(worker.report is not None for worker in tier):
        signal = Signal("load", 1.0, 1.0, "", "times its aim")
        reason = "no replica reports its load" if tier else "there is no replica"
        reason += ": requests want one" if active and not tier else ""
    else:
        signals = _SIGNALS[role](present, policy.aims)
        signal = max(signals, key=lambda each: each.load)  # the first of equal ones
        reason = signal.words
    replicas = _replicas(present, role)
    recommendation = Recommendation(role, replicas, signal, policy.limits_of(role), reason, active)
    return _with_bound(recommendation)


def recommend_all(fleet: Sequence[WorkerLoad], policy: AutoscalePolicy) -> list[Recommendation]:
    """The recommendations of all tiers."""
    return [recommend(fleet, role, policy) for role in Role]


def is_active(fleet: Sequence[WorkerLoad], role: Role) -> bool:
    """Whether the tier needs at least one replica. Routers and kvstores do at any time; the others while
    requests run, wait or were refused for want of a worker. Jobs that could run want one, but no drafter."""
    if role in (Role.ROUTER, Role.KVSTORE):
        return True
    asking = _reports(fleet, Role.ROUTER)
    wanted = sum(report.requests_running + report.requests_waiting for report in asking)
    wanted += runnable_jobs(asking) if role is not Role.DRAFTER else 0
    wanted += sum(report.requests_unplaced for report in asking)
    held = [*_reports(fleet, Role.DECODE), *_reports(fleet, role)]
    return bool(wanted) or any(report.requests_running + report.requests_waiting for report in held)


def runnable_jobs(routers: Reports) -> int:
    """The stored jobs that routers run, or would run at once with workers enough.

    Every router reports the same queue. So many jobs as routers may run at a time bound what a long queue
    asks for. Jobs that wait for live requests to end ask for nothing.
    """
    there = max((report.jobs_waiting for report in routers), default=0)
    there += sum(report.jobs_running for report in routers)
    return min(there, sum(report.jobs_allowed for report in routers))


def prefill_per_decode(recommendations: Iterable[Recommendation]) -> float:
    """Prefill workers for each decode worker that the present traffic wants; 0 while either tier is idle."""
    loads = {each.role: each.load for each in recommendations}
    decode = loads.get(Role.DECODE, 0.0)
    return loads.get(Role.PREFILL, 0.0) / decode if decode else 0.0


def _with_bound(found: Recommendation) -> Recommendation:
    """The reason names the limit that decides instead of the load."""
    limits, reason = found.limits, found.reason
    if not limits.most:
        reason += "; its limits leave the tier out"
    elif found.load > limits.most:
        reason += f"; at most {limits.most} are allowed"
    elif found.load < limits.least and found.wanted == limits.least:
        reason += f"; at least {limits.least} are wanted at any load"
    return Recommendation(found.role, found.replicas, found.signal, limits, reason, found.active)


# ---- the signals of each tier; at least one process of it reports


def _prefill(fleet: Sequence[WorkerLoad], aims: Aims) -> list[Signal]:
    reports, routers = _reports(fleet, Role.PREFILL), _reports(fleet, Role.ROUTER)
    rates = [report.prefill_tokens_per_s for report in reports if report.prefill_tokens_per_s > 0]
    tokens_per_s = _mean(_bounded(rates)) or ASSUMED_PREFILL_TOKENS_PER_S
    tokens = sum(map(_queued_tokens, reports)) / len(reports)
    tokens += sum(report.prefill_tokens_in_flight for report in routers) / _replicas(fleet, Role.PREFILL)
    return [
        Signal("queued_s", tokens / tokens_per_s, aims.queued_s, " s", "of prompts queued a worker"),
        _busy(reports, aims),
        _jobs(fleet, Role.PREFILL, aims),
    ]


def _decode(fleet: Sequence[WorkerLoad], aims: Aims) -> list[Signal]:
    reports, routers = _reports(fleet, Role.DECODE), _reports(fleet, Role.ROUTER)
    signals = [
        Signal("kv_share", _mean(_held_shares(reports)), aims.kv_share, "", "of the KV blocks held"),
        _steps(reports, aims),
        _jobs(fleet, Role.DECODE, aims),
    ]
    places = [worker.max_sequences for worker in fleet if worker.role is Role.DECODE]
    if places and all(places):
        sequences = sum(report.requests_running + report.requests_waiting for report in reports)
        waiting = sum(report.requests_waiting_decode for report in routers)
        share = (sequences * len(places) / len(reports) + waiting) / sum(places)
        signals.append(Signal("batch_share", share, aims.batch_share, "", "of the batches' places wanted"))
    return signals


def _steps(reports: Reports, aims: Aims) -> Signal:
    """The length of decode steps; it wants at most one worker for each STEP_SEQUENCES sequences.

    Without that bound a fleet whose shortest step exceeds the aim would grow without end. Below the bound the
    value stays above 0, so that no fleet shrinks and grows in turns.
    """
    mean_ms = _mean([report.decode_step_ms if report.requests_running else 0.0 for report in reports])
    sequences = _mean([report.requests_running for report in reports])
    most_ms, meaning = aims.step_ms * sequences / STEP_SEQUENCES, "a step"
    if mean_ms > most_ms:
        meaning += (
            f" (measured {mean_ms:.3g}, but a worker for fewer than {STEP_SEQUENCES} sequences is no faster)"
        )
    return Signal("step_ms", min(mean_ms, most_ms), aims.step_ms, " ms", meaning)


def _drafter(fleet: Sequence[WorkerLoad], aims: Aims) -> list[Signal]:
    decode = _reports(fleet, Role.DECODE)
    busy = _busy(_reports(fleet, Role.DRAFTER), aims)
    asking = [report for report in decode if report.drafts_due_per_s > 0]
    due = _bounded([report.drafts_due_per_s for report in asking])
    missed = [
        counted * min(report.drafts_missed_per_s / report.drafts_due_per_s, 1.0)
        for counted, report in zip(due, asking, strict=True)
    ]
    share = sum(missed) / sum(due) if due else 0.0
    if busy.value < IDLE_SHARE:
        return [busy]
    return [busy, Signal("missed_share", share, aims.missed_share, "", "of the drafts too late")]


def _router(fleet: Sequence[WorkerLoad], aims: Aims) -> list[Signal]:
    reports = _reports(fleet, Role.ROUTER)
    share = _mean([report.busy_share for report in reports])
    busy = Signal("loop_busy_share", share, aims.loop_busy_share, "", "of the time busy")
    known = [report for report in reports if report.requests_allowed]
    share = _mean([report.requests_admitted / report.requests_allowed for report in known])
    meaning = "of the requests admitted that a router may run at once"
    signals = [busy, Signal("requests_share", share, aims.requests_share, "", meaning)]
    if busy.value < IDLE_SHARE:
        return signals
    delay_ms = _mean([report.event_loop_delay_ms for report in reports])
    return [*signals, Signal("loop_delay_ms", delay_ms, aims.loop_delay_ms, " ms", "of event-loop delay")]


def _kvstore(fleet: Sequence[WorkerLoad], aims: Aims) -> list[Signal]:
    """The signals of kvstores, never below the target: the blocks of a node that goes are lost."""
    reports = _reports(fleet, Role.KVSTORE)
    mib_per_s = _mean([report.evicted_wanted_bytes_per_s for report in reports]) / _MIB
    target = aims.evicted_wanted_mib_per_s
    meaning = "of evicted blocks wanted again a node"
    if mib_per_s < target:
        meaning += f" (measured {mib_per_s:.3g}, counted as the aim: never scaled down)"
    return [Signal("evicted_wanted_mib_per_s", max(mib_per_s, target), target, " MiB/s", meaning)]


_SIGNALS: dict[Role, Callable[[Sequence[WorkerLoad], Aims], list[Signal]]] = {
    Role.ROUTER: _router,
    Role.PREFILL: _prefill,
    Role.DECODE: _decode,
    Role.KVSTORE: _kvstore,
    Role.DRAFTER: _drafter,
}


def _queued_tokens(report: worker_pb2.LoadReport) -> float:
    """The tokens that wait behind another prompt: one prompt alone is not computed sooner by more workers."""
    requests = report.requests_running + report.requests_waiting
    return report.prefill_tokens_in_flight * max(requests - 1, 0) / max(requests, 1)


def _jobs(fleet: Sequence[WorkerLoad], role: Role, aims: Aims) -> Signal:
    jobs = runnable_jobs(_reports(fleet, Role.ROUTER)) / _replicas(fleet, role)
    return Signal("jobs", jobs, aims.jobs, "", "stored jobs to run a worker")


def _busy(reports: Reports, aims: Aims) -> Signal:
    share = _mean([report.busy_share for report in reports])
    return Signal("busy_share", share, aims.busy_share, "", "of the time busy")


def _reports(fleet: Sequence[WorkerLoad], role: Role) -> list[worker_pb2.LoadReport]:
    return [worker.report for worker in fleet if worker.role is role and worker.report is not None]


def _replicas(fleet: Sequence[WorkerLoad], role: Role) -> int:
    return len({worker.replica for worker in fleet if worker.role is role})


def _held_shares(reports: Reports) -> list[float]:
    """The share of its blocks that each worker holds, of those that know their blocks."""
    blocks = [(each.blocks_held, each.blocks_cached + each.blocks_free) for each in reports]
    return [held / (held + others) for held, others in blocks if held + others]


def _bounded(rates: Sequence[float]) -> list[float]:
    """The rates, of which none counts as more than a few usual ones: a false one hides no queue."""
    most = _MOST_RATES * median_low(rates) if rates else 0.0
    return [min(rate, most) for rate in rates]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
