"""The workers as placement sees them: columns that follow the load and the fitted rates of each connection.

The columns are built when a worker came, went or changed its readiness. Between two decisions, only the rows
of workers whose load or rates changed are written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import repeat
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from libs.common.cluster.placement_record import Placement
from services.router.placement.fleet_arrays import FleetArrays, HeldColumns
from services.router.placement.round_robin import ColdRoundRobin
from services.router.placement.types import DecodeWorker, KvStore, PlacementFleet, PrefillWorker
from services.router.placement.worker_models import WorkerModels
from services.router.prefix_index.index import PrefixIndex, PrefixMatch
from services.router.workers.connection import WorkerConnection
from slipstream.v1 import common_pb2, worker_pb2

_load_version = attrgetter("load_version")
_report_version = attrgetter("report_version")


class PlacementView:
    """Keeps one FleetArrays in step with the connections of one fleet."""

    def __init__(self, *, clock: Callable[[], float], region_ms: Mapping[str, float]) -> None:
        self._clock = clock
        self._region_ms = region_ms
        self._arrays = FleetArrays(PlacementFleet())
        self._prefill = _RoleRows((), WorkerModels(), _load_version)
        self._decode = _RoleRows((), WorkerModels(), _report_version)
        # What the reports of decode workers count beyond this router's own requests.
        self._other_tokens = self._other_requests = np.zeros(0)

    def rebuild(
        self,
        prefill: Sequence[WorkerConnection],
        decode: Sequence[WorkerConnection],
        stores: Sequence[WorkerConnection],
        models: WorkerModels,
        round_robin: ColdRoundRobin,
    ) -> None:
        """Take these workers, one row each in this order, with their readiness of now."""
        models.drain_updates()
        self._prefill = _RoleRows(prefill, models, _load_version)
        self._decode = _RoleRows(decode, models, _report_version)
        self._arrays = FleetArrays(
            PlacementFleet(
                tuple([prefill_worker(each, models, round_robin) for each in prefill]),
                tuple([decode_worker(each, models) for each in decode]),
                tuple([kvstore(each) for each in stores]),
                self._region_ms,
            )
        )
        self._other_tokens, self._other_requests = np.zeros(len(decode)), np.zeros(len(decode))
        for row, link in enumerate(decode):
            self._write_others(row, link)

    def arrays(self, models: WorkerModels, round_robin: ColdRoundRobin) -> FleetArrays:
        """The columns as of now. They change with the next call."""
        prefill, decode = self._arrays.prefill, self._arrays.decode
        now_s, updated = self._clock(), models.drain_updates()
        for row, link in self._prefill.changed(now_s, updated):
            report, tokens, requests = link.load()
            prefill.set_load(row, tokens, requests, link.own_tokens)
            prefill.cold_turns[row] = round_robin.turn(link.key)
            rate = report.prefill_tokens_per_s if report is not None else 0.0
            prefill.rates.set(row, models.prefill_model(link.key, tokens_per_s=rate))
        for row, link in self._decode.changed(now_s, updated):
            report = self._write_others(row, link)
            decode.set_model(row, models.decode_model(link.key))
            decode.set_report(
                row, queued_tokens=_queued_tokens(report), free_blocks=_free_blocks(link, report)
            )
        links = self._decode.links
        decode.set_batches(
            np.array([link.tokens_in_flight for link in links], dtype=np.float64) + self._other_tokens,
            np.array([link.requests_in_flight for link in links], dtype=np.float64) + self._other_requests,
        )
        if updated:
            # Prefill times are fitted on prefill workers only: each decode worker has the model of that role.
            decode.rates.set_all(models.prefill_model(""))
        return self._arrays

    def held_columns(self, found: PrefixMatch, index: PrefixIndex, block_tokens: int) -> HeldColumns:
        """How many tokens of a prompt each worker holds, by the prefix index."""
        expected, confirmed = found.by_holder(common_pb2.CACHE_TIER_WORKER)
        prefill = self._prefill
        lendable = prefill.column(confirmed) * block_tokens
        # A worker that has not reported what it holds counts as if its predictions were confirmed.
        for key in (expected.keys() & prefill.row_of.keys()) - confirmed.keys():
            if not index.knows(key):
                confirmed[key] = expected[key]
        return HeldColumns(
            prefill.column(expected) * block_tokens,
            prefill.column(confirmed) * block_tokens,
            lendable,
            self._decode.column(expected) * block_tokens,
        )

    def add_session(self, held: HeldColumns, index: PrefixIndex, session: Placement, tokens: int) -> None:
        """Count the tokens of a session's record at its workers that have not reported what they hold."""
        arrays = self._arrays
        row = arrays.prefill.row_of.get(session.prefill)
        if row is not None and not index.knows(self._prefill.links[row].key):
            expected = max(held.prefill_expected[row], tokens)
            held.prefill_expected[row] = held.prefill_confirmed[row] = expected
        row = arrays.decode.row_of.get(session.decode)
        if row is not None and not index.knows(self._decode.links[row].key):
            held.decode_expected[row] = max(held.decode_expected[row], tokens)

    def mark_changed(self, key: str) -> None:
        """The round-robin number of a prefill worker changed: its row is to be written."""
        self._prefill.mark_changed(key)

    def _write_others(self, row: int, link: WorkerConnection) -> worker_pb2.LoadReport | None:
        report, tokens, requests = link.load()
        self._other_tokens[row] = tokens - link.tokens_in_flight
        self._other_requests[row] = requests - link.requests_in_flight
        return report


class _RoleRows:
    """The connections of one role, by row, and the state that each row was written from."""

    def __init__(
        self,
        links: Sequence[WorkerConnection],
        models: WorkerModels,
        version_of: Callable[[WorkerConnection], int],
    ) -> None:
        """`version_of`: rises with every change that makes a row differ."""
        self.links = list(links)
        self.row_of = {link.key: row for row, link in enumerate(links)}
        self._models = models
        self._version_of = version_of
        self._versions = [version_of(link) for link in links]
        self._stale_at_s = [link.stale_at_s for link in links]
        self._next_stale_s = min(self._stale_at_s, default=math.inf)
        self._unfitted = [link.key for link in links if not models.is_fitted(link.key)]

    def column(self, values: Mapping[str, int]) -> NDArray[np.float64]:
        """Values by key as a column, 0 where there is none. Keys of other roles are ignored."""
        return np.array(list(map(values.get, self.row_of, repeat(0))), dtype=np.float64)

    def mark_changed(self, key: str) -> None:
        """Write this row with the next changes."""
        if key in self.row_of:
            self._versions[self.row_of[key]] = -1

    def changed(self, now_s: float, updated: Collection[str]) -> list[tuple[int, WorkerConnection]]:
        """The rows to write now. `updated`: keys of workers whose rates changed."""
        versions = list(map(self._version_of, self.links))
        rows: set[int] = set()
        if versions != self._versions:
            pairs = enumerate(zip(versions, self._versions, strict=True))
            rows.update([row for row, (new, old) in pairs if new != old])
            self._versions = versions
        if updated:
            # Workers without rates of their own have those of the role, which follow all reports.
            self._unfitted = [key for key in self._unfitted if not self._models.is_fitted(key)]
            rows.update([self.row_of[key] for key in (*updated, *self._unfitted) if key in self.row_of])
        if now_s > self._next_stale_s:
            rows.update([row for row, stale_at_s in enumerate(self._stale_at_s) if now_s > stale_at_s])
        if rows:
            for row in rows:
                self._stale_at_s[row] = self.links[row].stale_at_s
            self._next_stale_s = min(self._stale_at_s)
        return [(row, self.links[row]) for row in rows]


def prefill_worker(
    link: WorkerConnection, models: WorkerModels, round_robin: ColdRoundRobin
) -> PrefillWorker:
    """The record of a prefill worker."""
    report, tokens, requests = link.load()
    rate = report.prefill_tokens_per_s if report is not None else 0.0
    return PrefillWorker(
        instance=link.worker.instance,
        fingerprint=link.digest,
        transport=link.transport,
        region=link.worker.region,
        refused=_refused(link),
        queued_tokens=tokens,
        queued_requests=requests,
        queue=link.own_tokens,
        cold_turn=round_robin.turn(link.key),
        model=models.prefill_model(link.key, tokens_per_s=rate),
    )


def decode_worker(link: WorkerConnection, models: WorkerModels) -> DecodeWorker:
    """The record of a decode worker."""
    report, tokens, requests = link.load()
    capacity = link.worker.capacity
    return DecodeWorker(
        instance=link.worker.instance,
        fingerprint=link.digest,
        transport=link.transport,
        region=link.worker.region,
        refused=_refused(link),
        context_tokens=tokens,
        sequences=requests,
        queued_tokens=_queued_tokens(report),
        free_blocks=_free_blocks(link, report),
        max_sequences=capacity.get("max_batch", 0),
        block_tokens=capacity.get("block_tokens", 64),
        block_bytes=capacity.get("block_bytes", 0),
        model=models.decode_model(link.key),
        prefill_model=models.prefill_model(link.key),
    )


def kvstore(link: WorkerConnection) -> KvStore:
    """The record of a kvstore."""
    return KvStore(link.worker.instance, link.transport, link.worker.region, _refused(link))


def _queued_tokens(report: worker_pb2.LoadReport | None) -> int:
    return report.prefill_tokens_in_flight if report is not None else 0


def _free_blocks(link: WorkerConnection, report: worker_pb2.LoadReport | None) -> int | None:
    return report.blocks_free + report.blocks_cached if report and link.worker.capacity else None


def _refused(link: WorkerConnection) -> str:
    return "" if link.ready else "does not answer"
