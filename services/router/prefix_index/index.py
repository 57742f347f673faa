"""The index of KV blocks: which holders have how much of a prompt, confirmed or predicted. Pure.

Both kinds are a holder's claims on blocks of chains (radix_forest.py). A block that several holders have is
one entry with a bit for each. A placement predicts entries, so that requests of one burst with a common
prefix go to the same worker. Predictions are valid until the worker's events confirm them or they expire.

A holder, such as a kvstore, may have a block without the blocks before it. Its prefix match ends before the
first missing block. Blocks that the index evicts for lack of memory count as missing everywhere. A wrong
entry costs time and never correctness.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from libs.common import service_bounds
from services.router.prefix_index.block_node import (
    ConfirmedBlocks,
    PredictedBlocks,
    Predictions,
    leading_ones,
)
from services.router.prefix_index.radix_forest import ChainPath, RadixForest
from slipstream.block_view import EventCursor

# Of each tier of a holder, for an estimate: they take some milliseconds.
_COUNTED_NODES = 4096


class HolderView(EventCursor):
    """The blocks that one holder reported, by tier, up to `sequence` of `incarnation`."""

    def __init__(self, forest: RadixForest) -> None:
        super().__init__()
        self._forest = forest
        self.tiers: dict[int, ConfirmedBlocks] = {}
        self._incoming: dict[int, ConfirmedBlocks] = {}

    @property
    def blocks(self) -> int:
        """The number of blocks, summed over the tiers."""
        return sum(claims.n_blocks for claims in self.tiers.values())

    def stored(self, tier: int, hashes: Sequence[bytes]) -> None:
        self._forest.stored(self.tiers.setdefault(tier, ConfirmedBlocks()), hashes)

    def removed(self, tier: int, hashes: Sequence[bytes]) -> None:
        if tier in self.tiers:
            self._forest.removed(self.tiers[tier], hashes)

    def in_snapshot(self, tier: int, hashes: Sequence[bytes]) -> None:
        self._forest.stored(self._incoming.setdefault(tier, ConfirmedBlocks()), hashes)

    def end_snapshot(self, *, complete: bool) -> None:
        replaced = self._incoming
        if complete:
            replaced, self.tiers = self.tiers, self._incoming
        self._incoming = {}
        for claims in replaced.values():
            self._forest.drop(claims)

    def clear(self) -> None:
        """Drop all blocks."""
        for claims in (*self.tiers.values(), *self._incoming.values()):
            self._forest.drop(claims)
        self.tiers, self._incoming = {}, {}


@dataclass(slots=True)
class _Holder:
    view: HolderView
    predicted: PredictedBlocks = field(default_factory=PredictedBlocks)


class PrefixMatch:
    """Which holders have how much of one prompt. Valid until the index changes."""

    __slots__ = ("_holders", "_nodes", "_now_s")

    def __init__(self, path: ChainPath, holders: dict[str, _Holder], *, now_s: float) -> None:
        self._holders = holders
        self._now_s = now_s
        # The claims on each node, and how many of its blocks belong to the prompt.
        self._nodes = [
            (node.confirmed, node.predicted, min(node.n_keys, path.n_blocks - node.first_block))
            for node in path.nodes
        ]

    def blocks(self, holder: str, *, tier: int | None = None) -> int:
        """How many leading blocks the holder has or will have; with `tier`, those it has in that tier."""
        known = self._holders.get(holder) if self._nodes else None
        if known is None:
            return 0
        tiers = known.view.tiers
        if tier is None:
            return self._prefix(tiers.values(), known.predicted)
        return self._prefix((tiers[tier],), None) if tier in tiers else 0

    def _prefix(self, tiers: Iterable[ConfirmedBlocks], predicted: PredictedBlocks | None) -> int:
        n_held = 0
        for confirmed, predictions, n_asked in self._nodes:
            bits = 0
            for claims in tiers:
                if claims in confirmed:
                    bits |= confirmed[claims]
            if predicted in predictions and predicted is not None:
                bits |= _predicted_bits(predictions[predicted], self._now_s)
            if not bits:
                return n_held
            n_blocks = leading_ones(bits)
            if n_blocks < n_asked:
                return n_held + n_blocks
            n_held += n_asked
        return n_held


def _predicted_bits(predictions: Predictions, now_s: float) -> int:
    """The blocks of a node that a holder will have, as bits."""
    for n_blocks, until_s in predictions:
        if until_s > now_s:
            return (1 << n_blocks) - 1
    return 0


class PrefixIndex:
    """Holders have any names. Bounded in bytes, for each tenant and in all."""

    def __init__(
        self,
        *,
        max_bytes: int = service_bounds.MAX_PREFIX_INDEX_BYTES,
        max_tenant_bytes: int = service_bounds.MAX_TENANT_PREFIX_INDEX_BYTES,
    ) -> None:
        self._forest = RadixForest(max_bytes=max_bytes, max_tenant_bytes=max_tenant_bytes)
        self.event_pauses = 0  # of the streams that feed the index
        self._holders: dict[str, _Holder] = {}

    @property
    def blocks(self) -> int:
        """The number of different blocks that any holder has or will have."""
        return self._forest.tree.n_blocks

    @property
    def nodes(self) -> int:
        """The number of radix tree nodes with these blocks."""
        return self._forest.tree.n_nodes

    @property
    def n_bytes(self) -> int:
        """The approximate memory of the index."""
        return self._forest.lru.n_bytes

    @property
    def evicted_blocks(self) -> int:
        """How many blocks were evicted so far, because of a bound."""
        return self._forest.tree.evicted_blocks

    def gauges(self) -> dict[str, float]:
        """The index's metrics by name (libs/common/telemetry/metric_tables/table.py)."""
        return {
            "slipstream_prefix_index_bytes": float(self.n_bytes),
            "slipstream_prefix_index_blocks": float(self.blocks),
            "slipstream_prefix_index_evicted_blocks_total": float(self.evicted_blocks),
            "slipstream_block_event_pauses_total": float(self.event_pauses),
        }

    def unique_blocks(self, holder: str) -> int:
        """How many blocks no other holder reported: an estimate from a bounded number of nodes."""
        known = self._holders.get(holder)
        if known is None:
            return 0
        own = known.view.tiers.values()
        nodes = {node for claims in own for node in itertools.islice(claims.nodes, _COUNTED_NODES)}
        n_unique = sum(node.unique_blocks(own) for node in nodes)
        share = max((len(claims.nodes) / _COUNTED_NODES for claims in own), default=0.0)
        return int(n_unique * max(share, 1.0))

    def tenant_bytes(self, tenant: str | None) -> int:
        """The memory of a tenant's blocks; None: of blocks that no prompt has contained yet."""
        return self._forest.lru.tenant_bytes(tenant)

    def check(self) -> None:
        """Raises Internal when the index contradicts itself."""
        self._forest.tree.check()

    @property
    def holders(self) -> frozenset[str]:
        """All holders with a view or a prediction that were not dropped since."""
        return frozenset(self._holders)

    # ---- reports of holders

    def view(self, holder: str) -> HolderView:
        """The holder's view, for its events to be applied to; made if missing."""
        return self._holder(holder).view

    def knows(self, holder: str) -> bool:
        """Whether the holder has reported its blocks."""
        known = self._holders.get(holder)
        return known is not None and bool(known.view.incarnation)

    def drop(self, holder: str) -> None:
        """Drop a holder and its blocks. Idempotent."""
        known = self._holders.pop(holder, None)
        if known is not None:
            known.view.clear()
            self._forest.drop(known.predicted)

    def _holder(self, name: str) -> _Holder:
        known = self._holders.get(name)
        if known is None:
            known = self._holders[name] = _Holder(HolderView(self._forest))
        return known

    # ---- predictions

    def predict(
        self, holder: str, hashes: Sequence[bytes], *, tenant: str, now_s: float, ttl_s: float
    ) -> None:
        """Predict that the holder will have these blocks of a prompt, in order, for `ttl_s`.

        Costs as much as the blocks that are new.
        """
        if hashes:
            claims = self._holder(holder).predicted
            self._forest.predict(claims, hashes, tenant=tenant, now_s=now_s, until_s=now_s + ttl_s)

    def clean_up(self, now_s: float, *, max_blocks: int = 1024) -> bool:
        """Remove some expired predictions and dropped holders within about 2 ms.

        Returns whether there may be more. Each prediction cleans up a few blocks too.
        """
        return self._forest.clean_up(now_s, max_blocks=max_blocks)

    # ---- lookups

    def find(self, hashes: Sequence[bytes], *, tenant: str, now_s: float) -> PrefixMatch:
        """Look up a tenant's prompt."""
        return PrefixMatch(self._forest.find(hashes, tenant=tenant), self._holders, now_s=now_s)

    def prefix_blocks(
        self, holder: str, hashes: Sequence[bytes], *, now_s: float, tier: int | None = None, tenant: str = ""
    ) -> int:
        """How many leading blocks of a prompt one holder has: `find` for one holder."""
        return self.find(hashes, tenant=tenant, now_s=now_s).blocks(holder, tier=tier)
