"""The tiers of KV with their contents and reads, and the places of sessions, as JSON."""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from libs.common.cluster.placement_record import Placement, SessionId
from libs.common.cluster.worker_record import Role, Worker
from services.router.console.worker_statuses import WorkerStatuses
from services.router.execution.sessions import Sessions
from services.router.recording.recorder import RequestRecorder
from services.router.workers.fleet import RouterFleet
from slipstream.enum_names import CACHE_TIERS, EVICTION_POLICIES
from slipstream.errors import InvalidArgument
from slipstream.v1 import worker_pb2

_KVSTORE = "slipstream_kvstore_"
# A tier's name here and in the metrics of a kvstore, and the capacity that a node announces of it.
_STORE_TIERS = (("memory", "dram", "dram_bytes"), ("pool", "pool", ""), ("disk", "nvme", "disk_bytes"))
_SHOWN_TIERS = {name: shown for shown, name, _ in _STORE_TIERS}
_EVICTED = f"{_KVSTORE}evictions_total"
_REREQUESTED = tuple(f"{_KVSTORE}evicted_rerequested{tier}_total" for tier in ("", "_nvme", "_pool"))
_STORES = ("dram", "nvme", "pool")
_COUNTERS = (
    _EVICTED,
    *_REREQUESTED,
    *(f"{_KVSTORE}{kind}_{tier}" for kind in ("blocks", "bytes") for tier in _STORES),
    *(f"{_KVSTORE}hits_{tier}_total" for tier in _STORES),
)
# Sums of a fleet stay whole numbers.
_MAX_TOTAL = 1 << 53
_MAX_POLICIES = 8  # of a tier, and tiers of a node


class CacheView:
    """Reads the tiers; `refresh` of the statuses comes first."""

    def __init__(
        self,
        fleet: RouterFleet,
        sessions: Sessions,
        recorder: RequestRecorder,
        statuses: WorkerStatuses,
    ) -> None:
        self._fleet = fleet
        self._sessions = sessions
        self._recorder = recorder
        self._statuses = statuses

    async def json(self, *, after: str, limit: int, tenant: str = "") -> dict[str, Any]:
        """The page of the caches, with one page of sessions. Raises InvalidArgument for a bad cursor."""
        block_tokens = self._block_tokens()
        # All tenants may have 100,000s of sessions: to collect and order them takes longer than streams may
        # wait. The table may change meanwhile: it joins its keys in one step, then looks each up.
        sessions = await asyncio.to_thread(
            lambda: sessions_page(
                self._sessions.all(), after=after, limit=limit, tenant=tenant, block_tokens=block_tokens
            )
        )
        links = self._fleet.links_of(Role.KVSTORE)
        stores = [(link.worker, self._statuses.status(link.worker)) for link in links]
        answers = [(worker, status.counters) for worker, status in stores if status is not None]
        totals: Counter[str] = Counter()
        for _, counters in answers:
            totals.update(dict(known_totals(counters)))
        return {
            "tiers": [
                *self._engine_tiers(block_tokens),
                *store_tiers(totals, [worker for worker, _ in answers]),
            ],
            "prompt_tokens": self._recorder.prompt_tokens,
            "cached_tokens": cached_by_source(self._recorder.cached_tokens),
            "evicted_blocks": int(totals[_EVICTED]),
            "evicted_wanted_blocks": int(sum(totals[name] for name in _REREQUESTED)),
            "policies": [
                {"instance": worker.instance, **shown}
                for worker, status in stores
                if status is not None
                for shown in _shown_evictions(status.evictions)
            ],
            "sessions": sessions,
        }

    def _engine_tiers(self, block_tokens: int) -> Iterable[dict[str, Any]]:
        for role in (Role.PREFILL, Role.DECODE):
            links = self._fleet.links_of(role)
            reports = [link.report for link in links if link.report is not None]
            used = sum([report.blocks_cached + report.blocks_held for report in reports])
            block_bytes = max([link.worker.capacity.get("block_bytes", 0) for link in links], default=0)
            total = used + sum([report.blocks_free for report in reports])
            yield {
                "tier": role,
                "blocks_total": total,
                "blocks_used": used,
                "hits_blocks": self._recorder.cached_tokens[role.value] // block_tokens,  # at this router
                "bytes_used": used * block_bytes or None,
                "bytes_total": total * block_bytes or None,
            }

    def _block_tokens(self) -> int:
        fingerprint = self._fleet.fingerprint()
        return fingerprint.block_tokens or 64 if fingerprint is not None else 64


def _shown_evictions(evictions: Sequence[worker_pb2.TierEviction]) -> Iterator[dict[str, str]]:
    for eviction in evictions[:_MAX_POLICIES]:
        names = [EVICTION_POLICIES.name(policy) for policy in eviction.policies[:_MAX_POLICIES]]
        if names:
            tier = CACHE_TIERS.name(eviction.tier)
            yield {"tier": _SHOWN_TIERS.get(tier, tier), "policy": ", ".join(names)}


def known_totals(counters: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    """The counters that this page sums. A figure of a node that is no amount counts as none."""
    for name in _COUNTERS:
        value = counters.get(name, 0)
        yield name, value if 0 <= value <= _MAX_TOTAL else 0


def store_tiers(totals: Mapping[str, float], nodes: Sequence[Worker]) -> list[dict[str, Any]]:
    """The tiers of all kvstore nodes together. A total that no node announces is null."""
    tiers = []
    for name, metric, capacity in _STORE_TIERS:
        blocks = int(totals.get(f"{_KVSTORE}blocks_{metric}", 0))
        used_bytes = int(totals.get(f"{_KVSTORE}bytes_{metric}", 0))
        total_bytes = sum(node.capacity.get(capacity, 0) for node in nodes)
        block_bytes = used_bytes / blocks if blocks else 0
        tiers.append(
            {
                "tier": name,
                "blocks_total": int(total_bytes / block_bytes) if total_bytes and block_bytes else None,
                "blocks_used": blocks,
                "hits_blocks": int(totals.get(f"{_KVSTORE}hits_{metric}_total", 0)),
                "bytes_used": used_bytes,
                "bytes_total": total_bytes or None,
            }
        )
    return tiers


def cached_by_source(cached: Mapping[str, int]) -> dict[str, int]:
    """Tokens that were not computed, by where their KV came from."""
    stores = {tier: cached.get(tier, 0) for tier in _STORES}
    local = cached.get(Role.PREFILL.value, 0) + cached.get(Role.DECODE.value, 0)
    own = {"local": local, "peer": cached.get("peer", 0)}
    return {**own, **stores, "kvstore": sum(stores.values())}


def sessions_page(
    sessions: Mapping[SessionId, Placement], *, after: str, limit: int, block_tokens: int, tenant: str = ""
) -> dict[str, Any]:
    """The sessions behind the cursor `after`, of all tenants or of one, in the order of their names."""
    if tenant:
        sessions = {name: placement for name, placement in sessions.items() if name.tenant == tenant}
    behind = sessions.items()
    if after:
        first = _read_cursor(after)
        found = heapq.nsmallest(limit, [item for item in behind if _order(item) > first], key=_order)
    else:
        found = heapq.nsmallest(limit, behind, key=_order)
    rows = [
        {
            "session": session.session,
            "tenant": session.tenant,
            "prefill": placement.prefill,
            "decode": placement.decode,
            "kvstore": placement.kvstore,
            "tokens": placement.block_count * block_tokens,
            "updated_ms": None,
        }
        for session, placement in found
    ]
    is_last = len(found) < limit
    return {"total": len(sessions), "page": rows, "next": None if is_last else found[-1][0].key}


def _order(item: tuple[SessionId, Placement]) -> tuple[str, str]:
    return item[0].tenant, item[0].session


def _read_cursor(after: str) -> tuple[str, str]:
    try:
        session = SessionId.from_key(after)
    except ValueError:
        raise InvalidArgument("sessions_after", "must be a cursor of an earlier page") from None
    return session.tenant, session.session
