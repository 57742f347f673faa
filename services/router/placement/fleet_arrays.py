"""The fleet as columns of numbers, one row a worker, so that a decision prices all rows at once. Pure.

The router keeps one `FleetArrays` until a worker comes, goes or changes its readiness, and writes the load of
a worker to its row when that load changes. Columns are float64: token counts below 2**53 stay exact, and a
larger one, from a worker that reports nonsense, cannot overflow.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from services.router.placement.cost_model import DecodeModel, PrefillModel
from services.router.placement.types import (
    DecodeWorker,
    KvStore,
    PlacementFleet,
    PlacementRequest,
    PrefillWorker,
)

Column = NDArray[np.float64]
Rows = NDArray[np.intp]
Group = tuple[str, str]  # transport, region

FAILED = "failed this request"
OTHER_MODEL = "runs another model"


class WorkerRows:
    """The identity of each row's worker, and which rows a request may use."""

    def __init__(self, workers: Sequence[PrefillWorker] | Sequence[DecodeWorker]) -> None:
        self.instances = [worker.instance for worker in workers]
        self.row_of = {instance: row for row, instance in enumerate(self.instances)}
        self.groups: list[Group] = [(worker.transport, worker.region) for worker in workers]
        self.group_rows = _by_group(self.groups, range(len(self.groups)))
        self.in_group = {group: _mask(rows, len(self.groups)) for group, rows in self.group_rows.items()}
        self._fingerprints = [worker.fingerprint for worker in workers]
        self._refused = [worker.refused for worker in workers]
        self._usable: dict[str, Mapping[Group, Rows]] = {}

    def usable(self, fingerprint: str, failed: Set[str] = frozenset()) -> Mapping[Group, Rows]:
        """The rows of each group that may run a request, groups in order; `failed` instances are left out."""
        by_group = self._usable.get(fingerprint)
        if by_group is None:
            rows = [row for row in range(len(self.groups)) if not self.refusal(row, fingerprint)]
            by_group = self._usable[fingerprint] = _by_group(self.groups, rows)
        if not failed:
            return by_group
        rows = [row for rows in by_group.values() for row in rows if self.instances[row] not in failed]
        return _by_group(self.groups, sorted(rows))

    def refusal(self, row: int, fingerprint: str, failed: Set[str] = frozenset()) -> str:
        """The reason why a row's worker may not run a request; "" = it may."""
        if self.instances[row] in failed:
            return FAILED
        return self._refused[row] or ("" if self._fingerprints[row] == fingerprint else OTHER_MODEL)

    def tokens_column(self, tokens: Mapping[str, int]) -> Column:
        """Tokens by instance as a column. Unknown instances are ignored."""
        column = np.zeros(len(self.instances))
        for instance, n_tokens in tokens.items():
            row = self.row_of.get(instance)
            if row is not None:
                column[row] = n_tokens
        return column


def _by_group(groups: Sequence[Group], rows: Iterable[int]) -> Mapping[Group, Rows]:
    by_group: dict[Group, list[int]] = {}
    for row in rows:
        by_group.setdefault(groups[row], []).append(row)
    return {group: np.array(by_group[group], dtype=np.intp) for group in sorted(by_group)}


def _mask(rows: Rows, n: int) -> NDArray[np.bool_]:
    mask = np.zeros(n, dtype=np.bool_)
    mask[rows] = True
    return mask


class PrefillRates:
    """A PrefillModel for each row."""

    def __init__(self, models: Sequence[PrefillModel]) -> None:
        self._models: list[PrefillModel | None] = [None] * len(models)
        self._bind(np.empty((7, len(models))))
        for row, model in enumerate(models):
            self.set(row, model)

    def _bind(self, columns: NDArray[np.float64]) -> None:
        self._columns = columns
        (
            self.request_ms,
            self.token_ms,
            self.attention_ms,
            self.dram_token_ms,
            self.nvme_token_ms,
            self.peer_token_ms,
            self.longer_token_ms,
        ) = columns

    def copy(self) -> PrefillRates:
        """The rates of now, which do not change any more."""
        copied = PrefillRates(())
        copied._bind(self._columns.copy())
        return copied

    def set(self, row: int, model: PrefillModel) -> None:
        """Replace the rates of one row."""
        if model is not self._models[row]:
            self._models[row] = model
            self._columns[:, row] = _rates(model)

    def set_all(self, model: PrefillModel) -> None:
        """Give all rows the same rates."""
        if any([model is not each for each in self._models]):
            self._models = [model] * len(self._models)
            for column, rate in zip(self._columns, _rates(model), strict=True):
                column.fill(rate)

    def compute_ms(self, uncached_tokens: float | Column, prompt_tokens: int) -> Column:
        """`PrefillModel.compute_ms` of each row."""
        pairs = uncached_tokens * (prompt_tokens - uncached_tokens + uncached_tokens / 2) * 1e-3
        compute_ms: Column = self.request_ms + self.token_ms * uncached_tokens + self.attention_ms * pairs
        return compute_ms


def _rates(model: PrefillModel) -> tuple[float, ...]:
    return (
        model.request_ms,
        model.token_ms,
        model.attention_ms,
        model.dram_token_ms,
        model.nvme_token_ms,
        model.peer_token_ms,
        model.longer_token_ms,
    )


class PrefillArrays(WorkerRows):
    """The prefill workers."""

    def __init__(self, workers: Sequence[PrefillWorker]) -> None:
        super().__init__(workers)
        n = len(workers)
        self.rates = PrefillRates([worker.model for worker in workers])
        self.cold_turns = [worker.cold_turn for worker in workers]
        self.queued_tokens = np.zeros(n)
        self.own_tokens = np.zeros(n)  # of the requests in the row's queue
        # Of requests that only the worker's report counts; see `prefill_queue.py`.
        self.other_tokens, self.other_requests = np.zeros(n), np.zeros(n)
        self._queues: list[tuple[int, ...]] = [()] * n
        self._flat: tuple[Column, Rows] | None = None
        for row, worker in enumerate(workers):
            self.set_load(row, worker.queued_tokens, worker.queued_requests, worker.queue)

    def set_load(self, row: int, tokens: int, requests: int, queue: tuple[int, ...]) -> None:
        """Replace the load of one row; the numbers are those of a PrefillWorker."""
        own_tokens = sum(queue)
        self.queued_tokens[row] = tokens
        self.own_tokens[row] = own_tokens
        self.other_tokens[row] = max(tokens - own_tokens, 0)
        self.other_requests[row] = max(requests - len(queue), 0)
        if queue != self._queues[row]:
            self._queues[row] = queue
            self._flat = None

    def queues(self) -> tuple[Column, Rows]:
        """The tokens of all queued requests, in the order of the rows, and the row of each."""
        if self._flat is None:
            lengths = [len(queue) for queue in self._queues]
            tokens = np.fromiter(chain.from_iterable(self._queues), np.float64, sum(lengths))
            self._flat = tokens, np.repeat(np.arange(len(lengths), dtype=np.intp), lengths)
        return self._flat


class DecodeArrays(WorkerRows):
    """The decode workers."""

    def __init__(self, workers: Sequence[DecodeWorker]) -> None:
        super().__init__(workers)
        n = len(workers)
        self.rates = PrefillRates([worker.prefill_model for worker in workers])
        self.block_tokens = np.array([worker.block_tokens for worker in workers], dtype=np.float64)
        self.block_bytes = np.array([worker.block_bytes for worker in workers], dtype=np.float64)
        most = [worker.max_sequences or math.inf for worker in workers]
        self.max_sequences = np.array(most, dtype=np.float64)  # inf: unknown
        self._models: list[DecodeModel | None] = [None] * n
        self._columns = np.empty((5, n))
        self.step_base_ms, self.sequence_ms, self.context_ms, self.pull_ms, self.pull_mib_ms = self._columns
        self.queued_tokens, self.free_blocks = np.zeros(n), np.zeros(n)  # free blocks inf: unknown
        for row, worker in enumerate(workers):
            self.set_model(row, worker.model)
            self.set_report(row, queued_tokens=worker.queued_tokens, free_blocks=worker.free_blocks)
        self.set_batches(
            np.array([worker.context_tokens for worker in workers], dtype=np.float64),
            np.array([worker.sequences for worker in workers], dtype=np.float64),
        )

    def set_model(self, row: int, model: DecodeModel) -> None:
        """Replace the rates of one row."""
        if model is not self._models[row]:
            self._models[row] = model
            self._columns[:, row] = (
                model.step_base_ms,
                model.sequence_ms,
                model.context_ms,
                model.pull_ms,
                model.pull_mib_ms,
            )

    def set_report(self, row: int, *, queued_tokens: int, free_blocks: int | None) -> None:
        """Replace the numbers of one row that only the worker's report has."""
        self.queued_tokens[row] = queued_tokens
        self.free_blocks[row] = math.inf if free_blocks is None else free_blocks

    def set_batches(self, context_tokens: Column, sequences: Column) -> None:
        """Replace the batches of all rows, which change with every token. The columns are not copied."""
        self.context_tokens, self.sequences = context_tokens, sequences


class FleetArrays:
    """All workers of one fleet version."""

    def __init__(self, fleet: PlacementFleet) -> None:
        self.prefill = PrefillArrays(fleet.prefill)
        self.decode = DecodeArrays(fleet.decode)
        self.stores: tuple[KvStore, ...] = tuple(sorted(fleet.stores, key=lambda store: store.instance))
        self.region_ms = fleet.region_ms


@dataclass(slots=True)
class HeldColumns:
    """The maps of a PlacementRequest as columns: how many leading tokens have KV at each worker."""

    prefill_expected: Column
    prefill_confirmed: Column
    prefill_lendable: Column
    decode_expected: Column

    @classmethod
    def of(cls, request: PlacementRequest, fleet: FleetArrays) -> HeldColumns:
        """From the maps of a request."""
        expected = fleet.prefill.tokens_column(request.prefill_expected_tokens)
        confirmed = expected.copy()
        for instance, tokens in request.prefill_confirmed_tokens.items():
            row = fleet.prefill.row_of.get(instance)
            if row is not None:
                confirmed[row] = tokens
        return cls(
            expected,
            confirmed,
            fleet.prefill.tokens_column(request.prefill_lendable_tokens),
            fleet.decode.tokens_column(request.decode_expected_tokens),
        )
