"""All workers and routers of the cluster as JSON, as this router sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from libs.common.cluster.discovery import Fleet
from libs.common.cluster.worker_record import Role, Worker
from services.router.console.worker_statuses import Status, WorkerStatuses
from services.router.execution.request_manager import RequestManager
from services.router.workers.connection import WorkerConnection
from services.router.workers.fleet import RouterFleet
from services.router.workers.router_peers import RouterPeers
from slipstream import __version__
from slipstream.v1 import worker_pb2


@dataclass(frozen=True, slots=True)
class RouterIdentity:
    """This router. Its siblings are the other processes of one `--processes N`."""

    instance: str
    endpoint: str
    http_endpoint: str
    admin_http: str
    model: str
    started_s: float  # on the event loop's clock


class FleetView:
    """Reads the fleet; `refresh` of the statuses comes first."""

    def __init__(
        self,
        identity: RouterIdentity,
        manager: RequestManager,
        members: Fleet,
        peers: RouterPeers,
        statuses: WorkerStatuses,
        *,
        clock: Callable[[], float],
    ) -> None:
        self._identity = identity
        self._manager = manager
        self._members = members
        self._peers = peers
        self._statuses = statuses
        self._clock = clock

    def json(self, *, time_ms: float) -> dict[str, Any]:
        """The page of the fleet."""
        routers = self._routers()
        return {
            "time_ms": time_ms,
            "router": self._own(routers),
            "workers": sorted(self._workers(), key=lambda row: (row["role"], row["instance"])),
            "routers": routers,
        }

    def _own(self, routers: Sequence[dict[str, Any]]) -> dict[str, Any]:
        identity, gate = self._identity, self._manager.gate
        siblings = [row["instance"] for row in routers if row["sibling"]]
        return {
            "instance": identity.instance,
            "endpoint": identity.endpoint,
            "http_endpoint": identity.http_endpoint,
            "admin_http": identity.admin_http,
            "version": __version__,
            "model": identity.model,
            "uptime_ms": int((self._clock() - identity.started_s) * 1e3),
            "processes": 1 + len(siblings),
            "siblings": siblings,
            "draining": self._manager.draining,
            "requests_running": gate.running,
            "requests_queued": gate.waiting,
        }

    def _routers(self) -> list[dict[str, Any]]:
        identity, reports = self._identity, self._peers.reports()
        rows = [
            {
                "instance": identity.instance,
                "endpoint": identity.endpoint,
                "admin_http": identity.admin_http,
                "draining": self._manager.draining,
                "own": True,
                "sibling": False,
            }
        ]
        for worker in self._members.current.with_role(Role.ROUTER):
            if worker.instance == identity.instance:
                continue
            report = reports.get(worker.instance)
            rows.append(
                {
                    "instance": worker.instance,
                    "endpoint": worker.endpoint,
                    "admin_http": worker.admin_http,
                    "draining": None if report is None else report.draining,
                    "own": False,
                    "sibling": is_sibling(worker, identity),
                }
            )
        return rows

    def _workers(self) -> Iterator[dict[str, Any]]:
        fleet, seen = self._manager.context.fleet, set()
        for link in fleet.links():
            seen.add(link.worker.key)
            yield {
                **_identity_json(link.worker),
                "ready": link.ready,
                "draining": link.draining,
                "degraded": degraded_reason(fleet, link),
                "age_ms": round(link.report_age_s * 1e3) if link.has_reported else None,
                "load": None if link.report is None else self._load_json(link.worker, link.report),
            }
        for worker in self._statuses.leaving:
            status = self._statuses.status(worker)
            if worker.key not in seen and status is not None:  # it runs on
                yield {
                    **_identity_json(worker),
                    "ready": False,
                    "draining": True,
                    "degraded": None,
                    "age_ms": None,
                    "load": self._load_json(worker, status.load),
                }

    def _load_json(self, worker: Worker, report: worker_pb2.LoadReport) -> dict[str, Any]:
        return load_json(report) | store_load(worker, self._statuses.status(worker))


def is_sibling(worker: Worker, own: RouterIdentity) -> bool:
    """Whether a router is another process at the same address: they share their public port."""
    return worker.endpoint == own.endpoint and worker.instance != own.instance


def degraded_reason(fleet: RouterFleet, link: WorkerConnection) -> str | None:
    """Why a worker in discovery that does not drain gets no requests, or may stop to; None if it is well."""
    served = fleet.fingerprint()
    if link.draining:
        return None
    if not link.ready:
        return "sends no load reports" if link.has_reported else "does not answer"
    if served is not None and link.fingerprint is not None and link.fingerprint != served:
        return "has another model than most workers, and gets no requests"
    return None


def load_json(report: worker_pb2.LoadReport) -> dict[str, Any]:
    """A load report by the names of the console. Fields that a service lacks are 0."""
    total = report.blocks_free + report.blocks_cached + report.blocks_held
    return {
        "running_sequences": report.requests_running,
        "waiting_sequences": report.requests_waiting,
        "queued_tokens": report.prefill_tokens_in_flight,
        "context_tokens": report.decode_tokens_in_flight,
        "tokens_per_s": round(tokens_per_s(report), 1),
        "step_ms": round(report.decode_step_ms, 3),
        "kv_blocks_total": total,
        "kv_blocks_used": report.blocks_held,
        "kv_blocks_cached": report.blocks_cached,
        "kv_blocks_free": report.blocks_free,
        "busy_share": round(report.busy_share, 4),
        "handoffs": report.handoffs,
        "drafts_due_per_s": round(report.drafts_due_per_s, 2),
        "drafts_missed_per_s": round(report.drafts_missed_per_s, 2),
        "evicted_wanted_bytes_per_s": round(report.evicted_wanted_bytes_per_s, 1),
    }


def tokens_per_s(report: worker_pb2.LoadReport) -> float:
    """The tokens that a worker computed and sampled a second lately, as `slipstream top` shows them."""
    return report.prompt_tokens_per_s + report.generated_tokens_per_s


def store_load(worker: Worker, status: Status | None) -> dict[str, Any]:
    """The used and the total bytes of a kvstore node, beside its load report."""
    if worker.role is not Role.KVSTORE:
        return {}
    counters = {} if status is None else status.counters
    return {
        "memory_bytes_total": worker.capacity.get("dram_bytes"),
        "memory_bytes_used": counters.get("slipstream_kvstore_bytes_dram"),
        "disk_bytes_total": worker.capacity.get("disk_bytes"),
        "disk_bytes_used": counters.get("slipstream_kvstore_bytes_nvme"),
    }


def _identity_json(worker: Worker) -> dict[str, Any]:
    return {
        "role": worker.role,
        "instance": worker.instance,
        "endpoint": worker.endpoint,
        "region": worker.region,
        "node": worker.endpoint.rpartition(":")[0],
        "incarnation": worker.incarnation,
    }
