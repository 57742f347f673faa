"""Where a worker reads KV that it does not hold: a kvstore, another prefill worker, or nowhere. Pure.

Every prefill worker serves its prefix cache to the others, so that all caches are one. Of sources that cost
about the same a kvstore is used: reading from it disturbs no engine. KV that takes longer to read than to
compute is not read.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from services.router.placement.cost_model import PrefillModel, attention_pairs
from services.router.placement.types import Group, PlacementFleet, PlacementRequest

# A peer is read only if that saves this much of a kvstore's time: predictions of short reads are no better.
PEER_GAIN_MS = 5.0
_NO_LENDER = (0, 0, "")  # ranks behind any lender


class KvSource(msgspec.Struct, frozen=True, gc=False):
    """A kvstore, or a prefill worker, and how much of a prompt can be read there."""

    instance: str
    is_peer: bool
    tokens: int
    dram_tokens: int
    uncached_tokens: int  # of the prompt without `tokens`, with their `attention_pairs`
    pairs: float


class KvSources(msgspec.Struct, gc=False):
    """The sources of one group: kvstores, of which the first is read if several cost the same, and the
    prefill worker that lends most."""

    stores: list[KvSource]
    peer: KvSource | None = None

    def best_read(
        self, held_tokens: int, compute_ms: float, model: PrefillModel, *, with_peer: bool = True
    ) -> tuple[KvSource | None, float, float]:
        """(source, time to read it, time to compute the rest) for a worker that holds so many tokens and
        would compute the others in `compute_ms`. Without `with_peer` only kvstores are read."""
        best, best_load_ms, best_rest_ms = None, 0.0, compute_ms
        for store in self.stores:
            tokens = store.tokens - held_tokens
            if tokens > 0:
                dram_tokens = min(max(store.dram_tokens - held_tokens, 0), tokens)
                load_ms = model.load_ms(dram_tokens, tokens - dram_tokens)
                rest_ms = model.compute_pairs_ms(store.uncached_tokens, store.pairs)
                if load_ms + rest_ms < best_load_ms + best_rest_ms:
                    best, best_load_ms, best_rest_ms = store, load_ms, rest_ms
        peer = self.peer
        if peer is not None and peer.tokens > held_tokens and with_peer:
            load_ms = model.peer_token_ms * (peer.tokens - held_tokens)
            rest_ms = model.compute_pairs_ms(peer.uncached_tokens, peer.pairs)
            limit_ms = best_load_ms + best_rest_ms - (PEER_GAIN_MS if best is not None else 0.0)
            if load_ms + rest_ms < limit_ms:
                return peer, load_ms, rest_ms
        return best, best_load_ms, best_rest_ms


def find_sources(request: PlacementRequest, fleet: PlacementFleet) -> Mapping[Group, KvSources]:
    """The sources of each group that has any."""
    prompt_tokens = request.prompt_tokens
    sources: dict[Group, KvSources] = {}
    for store in fleet.stores:
        held = request.store_held.get(store.instance)
        if held is not None and held.tokens and not store.refused:
            source = _source(store.instance, held.tokens, held.dram_tokens, prompt_tokens, is_peer=False)
            sources.setdefault((store.transport, store.region), KvSources([])).stores.append(source)
    for of_group in sources.values():
        of_group.stores.sort(key=lambda source: source.instance, reverse=True)
    lendable = request.prefill_lendable_tokens
    if lendable and len(fleet.prefill) > 1:
        for group, instance in _lenders(request, fleet).items():
            of_group = sources.setdefault(group, KvSources([]))
            of_group.peer = _source(instance, lendable[instance], 0, prompt_tokens, is_peer=True)
    return sources


def _source(instance: str, tokens: int, dram_tokens: int, prompt_tokens: int, *, is_peer: bool) -> KvSource:
    tokens = min(tokens, prompt_tokens - 1)  # one token at least is computed
    uncached_tokens = prompt_tokens - tokens
    pairs = attention_pairs(uncached_tokens, prompt_tokens)
    return KvSource(instance, is_peer, tokens, dram_tokens, uncached_tokens, pairs)


def _lenders(request: PlacementRequest, fleet: PlacementFleet) -> Mapping[Group, str]:
    """The prefill worker of each group that lends most of the prompt; of equal ones the least busy."""
    lendable, fingerprint = request.prefill_lendable_tokens, request.fingerprint
    best: dict[Group, tuple[int, int, str]] = {}
    for worker in fleet.prefill:
        instance = worker.instance
        tokens = lendable.get(instance, 0)
        if tokens and not worker.refused and worker.fingerprint == fingerprint:
            group, rank = (worker.transport, worker.region), (-tokens, worker.queued_tokens, instance)
            if rank < best.get(group, _NO_LENDER):
                best[group] = rank
    return {group: instance for group, (_, _, instance) in best.items()}
