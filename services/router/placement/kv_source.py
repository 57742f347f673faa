"""Where a worker reads KV that it does not hold: a kvstore, another prefill worker, or nowhere. Pure.

Every prefill worker lends the blocks of its prefix cache, so that the caches of all are one. Of sources that
cost about the same a kvstore is taken: it disturbs no engine. Reading that takes longer than computing is
not planned for.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from services.router.placement.cost_model import PrefillModel
from services.router.placement.types import HeldTokens, PlacementFleet, PlacementRequest, PrefillWorker

# What a peer must save of a store's time to be disturbed: predictions of so short reads are no better.
PEER_GAIN_MS = 5.0


class KvSource(msgspec.Struct, frozen=True, gc=False):
    """`tokens` beyond those held, and the milliseconds to read them. `peer`: a prefill worker, no kvstore."""

    instance: str = ""
    peer: bool = False
    tokens: int = 0
    load_ms: float = 0.0


NOWHERE = KvSource()
NOTHING = HeldTokens()


def lenders(request: PlacementRequest, fleet: PlacementFleet) -> list[PrefillWorker]:
    """Prefill workers with something to lend, the most first; of equal ones the least busy."""
    if not request.prefill_lent:
        return []
    able = [
        worker
        for worker in fleet.prefill
        if not worker.refused
        and worker.fingerprint == request.fingerprint
        and request.prefill_lent.get(worker.instance, 0)
    ]
    return sorted(able, key=lambda w: (-request.prefill_lent[w.instance], w.queued_tokens, w.instance))


def best_source(
    request: PlacementRequest,
    fleet: PlacementFleet,
    *,
    group: tuple[str, str],
    held: int,
    model: PrefillModel,
    peers: Sequence[PrefillWorker] = (),
) -> KvSource:
    """The source of a worker of `group` that holds `held` tokens. `peers`: `lenders`, itself among them or
    not: what it holds itself is of no use to it."""
    prompt = request.prompt_tokens
    best, best_ms = NOWHERE, -1.0
    for store in fleet.stores:
        at_store = request.store_held.get(store.instance, NOTHING)
        loaded = usable(request, at_store.tokens) - held
        if loaded <= 0 or store.refused or (store.transport, store.region) != group:
            continue
        if best_ms < 0:
            best_ms = model.compute_ms(prompt - held, prompt)
        dram = min(max(at_store.dram_tokens - held, 0), loaded)
        load_ms = model.load_ms(dram, loaded - dram)
        total_ms = load_ms + model.compute_ms(prompt - held - loaded, prompt)
        # Of equal ones the same, whatever order they are told in.
        if total_ms < best_ms or (total_ms == best_ms and store.instance > best.instance > ""):
            best, best_ms = KvSource(store.instance, False, loaded, load_ms), total_ms
    for peer in peers:
        if (peer.transport, peer.region) != group:
            continue
        loaded = usable(request, request.prefill_lent[peer.instance]) - held
        if loaded <= 0:
            return best
        if best_ms < 0:
            best_ms = model.compute_ms(prompt - held, prompt)
        load_ms = model.load_ms(0, 0, loaded)
        limit_ms = best_ms - PEER_GAIN_MS if best.instance else best_ms
        if load_ms + model.compute_ms(prompt - held - loaded, prompt) < limit_ms:
            return KvSource(peer.instance, True, loaded, load_ms)
        return best
    return best


def usable(request: PlacementRequest, held_tokens: int) -> int:
    """At least one token is computed, always."""
    return max(0, min(held_tokens, request.prompt_tokens - 1))
