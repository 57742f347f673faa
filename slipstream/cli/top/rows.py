"""The figures that the fleet view shows: one row a process, one a tier. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from slipstream.cli.fleet.fleet_client import state_name
from slipstream.enum_names import ROLES
from slipstream.v1 import fleet_pb2, worker_pb2

TIERS = ("router", "prefill", "decode", "drafter", "kvstore")
# Shown also without processes: what is missing is what an operator looks for.
_ALWAYS = ("prefill", "decode", "kvstore")


@dataclass(frozen=True, slots=True)
class ProcessRow:
    """One process. Figures are None where its load is not known; `kv_share` where it has no blocks."""

    tier: str
    instance: str
    state: str  # ready, draining or silent
    running: float | None = None
    waiting: float | None = None
    kv_share: float | None = None  # that sequences hold; of a kvstore, that blocks fill
    prompt_tokens_per_s: float | None = None
    generated_tokens_per_s: float | None = None
    step_ms: float | None = None
    busy_share: float | None = None
    requests_per_s: float | None = None
    jobs_waiting: float | None = None  # stored jobs in the queue of all routers
    jobs_running: float | None = None

    @property
    def key(self) -> str:
        """`tier/instance`, unique in the fleet."""
        return f"{self.tier}/{self.instance}"


@dataclass(frozen=True, slots=True)
class TierRow:
    """The processes of a tier together: sums, and means of shares and steps."""

    tier: str
    ready: int
    processes: int
    total: ProcessRow


@dataclass(frozen=True, slots=True)
class FleetRows:
    """The rows that show one answer of a router."""

    router: str
    model: str
    processes: tuple[ProcessRow, ...]
    tiers: tuple[TierRow, ...]

    @property
    def has_decode(self) -> bool:
        """Whether a decode worker is ready: without one requests wait, and then fail."""
        return any(tier.tier == "decode" and tier.ready for tier in self.tiers)


def view_of(fleet: fleet_pb2.GetFleetResponse) -> FleetRows:
    """The rows of an answer, by tier and name."""
    rows = sorted(map(_row, fleet.processes), key=_by_tier)
    tiers = [_tier(name, [row for row in rows if row.tier == name]) for name in TIERS]
    shown = tuple(tier for tier in tiers if tier.processes or tier.tier in _ALWAYS)
    return FleetRows(fleet.router, fleet.model, tuple(rows), shown)


def _row(process: fleet_pb2.FleetProcess) -> ProcessRow:
    tier, state = ROLES.name(process.role), state_name(process)
    if not process.HasField("load"):
        return ProcessRow(tier, process.instance, state)
    load = process.load
    return ProcessRow(
        tier,
        process.instance,
        state,
        running=load.requests_running,
        waiting=load.requests_waiting,
        kv_share=_kv_share(tier, load),
        prompt_tokens_per_s=load.prompt_tokens_per_s,
        generated_tokens_per_s=load.generated_tokens_per_s,
        step_ms=load.decode_step_ms or None,
        busy_share=load.busy_share,
        requests_per_s=load.requests_per_s if tier == "router" else None,
        jobs_waiting=load.jobs_waiting if tier == "router" else None,
        jobs_running=load.jobs_running if tier == "router" else None,
    )


def _kv_share(tier: str, load: worker_pb2.LoadReport) -> float | None:
    blocks = load.blocks_free + load.blocks_cached + load.blocks_held
    if not blocks:
        return None
    used = blocks - load.blocks_free if tier == "kvstore" else load.blocks_held
    return used / blocks


def _tier(name: str, rows: Sequence[ProcessRow]) -> TierRow:
    total = ProcessRow(
        name,
        name,
        "",
        running=_sum(row.running for row in rows),
        waiting=_sum(row.waiting for row in rows),
        kv_share=_mean(row.kv_share for row in rows),
        prompt_tokens_per_s=_sum(row.prompt_tokens_per_s for row in rows),
        generated_tokens_per_s=_sum(row.generated_tokens_per_s for row in rows),
        step_ms=_mean(row.step_ms for row in rows),
        busy_share=_mean(row.busy_share for row in rows),
        requests_per_s=_sum(row.requests_per_s for row in rows),
        jobs_waiting=max(_known(row.jobs_waiting for row in rows), default=None),  # one queue
        jobs_running=_sum(row.jobs_running for row in rows),
    )
    return TierRow(name, sum(row.state == "ready" for row in rows), len(rows), total)


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _sum(values: Iterable[float | None]) -> float | None:
    known = _known(values)
    return sum(known) if known else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = _known(values)
    return sum(known) / len(known) if known else None


def _by_tier(row: ProcessRow) -> tuple[int, str, int]:
    """decode-2 comes before decode-10."""
    name = row.instance.rstrip("0123456789")
    number = int(row.instance[len(name) :] or -1)
    return (TIERS.index(row.tier) if row.tier in TIERS else len(TIERS), name, number)


_FIGURES: dict[str, Callable[[ProcessRow], float | None]] = {
    "load": lambda row: None if row.running is None else row.running + (row.waiting or 0),
    "kv": lambda row: row.kv_share,
    "tokens": lambda row: _sum((row.prompt_tokens_per_s, row.generated_tokens_per_s)),
    "step": lambda row: row.step_ms,
    "busy": lambda row: row.busy_share,
}
# By tier and name, else the largest figure first.
SORTS = ("tier", *_FIGURES)


def sorted_rows(rows: Iterable[ProcessRow], sort: str) -> list[ProcessRow]:
    """The rows in the order of one of SORTS; rows whose figure is unknown come last."""
    if sort == "tier":
        return sorted(rows, key=_by_tier)
    figure = _FIGURES[sort]

    def key(row: ProcessRow) -> tuple[bool, float, tuple[int, str, int]]:
        value = figure(row)
        return (value is None, -(value or 0.0), _by_tier(row))

    return sorted(rows, key=key)


def view_dict(view: FleetRows, sort: str) -> dict[str, object]:
    """The view as JSON has it."""
    tiers = [
        {"tier": tier.tier, "ready": tier.ready, "processes": tier.processes, **_figures_of(tier.total)}
        for tier in view.tiers
    ]
    processes = [dataclasses.asdict(row) for row in sorted_rows(view.processes, sort)]
    return {"router": view.router, "model": view.model, "tiers": tiers, "processes": processes}


def _figures_of(row: ProcessRow) -> dict[str, object]:
    named = dataclasses.asdict(row)
    return {name: value for name, value in named.items() if name not in ("tier", "instance", "state")}
