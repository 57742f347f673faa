"""Where a worker reads KV that it does not hold: a kvstore, another prefill worker, or nowhere. Pure.

Every prefill worker lends the blocks of its prefix cache to the others. Of sources that cost about the same
a kvstore is taken, because reading from it disturbs no engine. A read that takes longer than computing is not
planned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.router.placement.fleet_arrays import (
    Column,
    Group,
    PrefillArrays,
    PrefillRates,
    Rows,
    WorkerRows,
)
from services.router.placement.types import KvStore, PlacementRequest

# A read from a peer must save this much of a kvstore's time: predictions of such short reads are no better.
PEER_GAIN_MS = 5.0


@dataclass(slots=True)
class KvReads:
    """What each row reads: `loaded_tokens` beyond those it holds, in `load_ms`.

    `source` indexes `names`, the kvstores and then the peers; -1 means that the row reads nothing.
    """

    loaded_tokens: Column
    load_ms: Column
    source: NDArray[np.int64]
    names: list[str]
    n_stores: int

    def source_of(self, row: int) -> tuple[str, bool]:
        """The instance that a row reads from, "" for none, and whether it is a prefill worker."""
        source = int(self.source[row])
        return (self.names[source], source >= self.n_stores) if source >= 0 else ("", False)


def usable_tokens(request: PlacementRequest, held_tokens: int) -> int:
    """The held tokens that save work: a worker always computes at least one token."""
    return max(0, min(held_tokens, request.prompt_tokens - 1))


class _Search:
    """The best source found so far for each row, given the tokens that it holds."""

    def __init__(
        self, request: PlacementRequest, rows: WorkerRows, rates: PrefillRates, held_tokens: Column
    ) -> None:
        n = len(held_tokens)
        self.request, self.rows, self.rates, self.held_tokens = request, rows, rates, held_tokens
        self.loaded_tokens, self.load_ms = np.zeros(n), np.zeros(n)
        self.source = np.full(n, -1)
        self.best_ms = rates.compute_ms(request.prompt_tokens - held_tokens, request.prompt_tokens)
        self.names: list[str] = []

    def add_store(self, group: Group, tokens: int, dram_tokens: int, name: str) -> None:
        """Compare a kvstore with so many usable tokens. Names rise by call, and of equals the last wins."""
        loaded = tokens - self.held_tokens
        dram = np.minimum(np.maximum(dram_tokens - self.held_tokens, 0), loaded)
        load_ms = self.rates.dram_token_ms * dram + self.rates.nvme_token_ms * (loaded - dram)
        total_ms = load_ms + self._compute_rest_ms(tokens)
        better = (total_ms < self.best_ms) | ((total_ms == self.best_ms) & (self.source >= 0))
        self._keep(better & (loaded > 0) & self.rows.in_group[group], name, loaded, load_ms, total_ms)

    def add_peer(self, group: Group, tokens: int, name: str) -> None:
        """Compare the prefill worker of the group that lends the most usable tokens."""
        loaded = tokens - self.held_tokens
        load_ms = self.rates.peer_token_ms * loaded
        total_ms = load_ms + self._compute_rest_ms(tokens)
        limit_ms = np.where(self.source >= 0, self.best_ms - PEER_GAIN_MS, self.best_ms)
        better = (total_ms < limit_ms) & (loaded > 0) & self.rows.in_group[group]
        self._keep(better, name, loaded, load_ms, total_ms)

    def _compute_rest_ms(self, tokens: int) -> Column:
        prompt_tokens = self.request.prompt_tokens
        return self.rates.compute_ms(float(prompt_tokens - tokens), prompt_tokens)

    def _keep(
        self, better: NDArray[np.bool_], name: str, loaded: Column, load_ms: Column, total_ms: Column
    ) -> None:
        np.copyto(self.loaded_tokens, loaded, where=better)
        np.copyto(self.load_ms, load_ms, where=better)
        np.copyto(self.best_ms, total_ms, where=better)
        np.copyto(self.source, len(self.names), where=better)
        self.names.append(name)


def find_reads(
    request: PlacementRequest,
    rows: WorkerRows,
    rates: PrefillRates,
    held_tokens: Column,
    *,
    stores: Sequence[KvStore],
    peers: Mapping[Group, tuple[str, int]],
) -> KvReads | None:
    """The best source of each row; None if no row has one. `stores` by name; `peers`: names and tokens."""
    search: _Search | None = None
    for store in stores:
        held, group = request.store_held.get(store.instance), (store.transport, store.region)
        if held is None or group not in rows.in_group or is_refused(store, request):
            continue
        if tokens := usable_tokens(request, held.tokens):
            search = search or _Search(request, rows, rates, held_tokens)
            search.add_store(group, tokens, held.dram_tokens, store.instance)
    n_stores = len(search.names) if search is not None else 0
    for group, (peer, lent) in peers.items():
        if tokens := usable_tokens(request, lent):
            search = search or _Search(request, rows, rates, held_tokens)
            search.add_peer(group, tokens, peer)
    if search is None:
        return None
    return KvReads(search.loaded_tokens, search.load_ms, search.source, search.names, n_stores)


def best_lenders(
    prefill: PrefillArrays, usable: Mapping[Group, Rows], lendable_tokens: Column
) -> Mapping[Group, int]:
    """The row of each group's usable worker that lends most; of equal ones the least busy, then by name."""
    best: dict[Group, int] = {}
    for group, rows in usable.items():
        lent = lendable_tokens[rows]
        most = lent[lent.argmax()]
        if most > 0:
            equal = rows[lent == most].tolist()
            best[group] = (
                equal[0]
                if len(equal) == 1
                else min(equal, key=lambda row: (prefill.queued_tokens[row], prefill.instances[row]))
            )
    return best


def is_refused(store: KvStore, request: PlacementRequest) -> bool:
    """Whether the request may not use a kvstore."""
    return bool(store.refused) or store.instance in request.failed_stores
