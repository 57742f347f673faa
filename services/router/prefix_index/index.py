"""Where the KV of a prompt's prefix is: what workers say they hold, and what was just sent to them. Pure.

Both are claims of a holder on blocks of chains (`block_forest.py`): of a block that several hold the index
keeps one entry and a bit for each. Entries predicted at routing time stand in until the worker's events
confirm them or their time is over, so that siblings that come in one burst find each other.

A holder may keep a block without those before it (a store does): the prefix it holds ends where the first
block is missing, and goes on when that comes. What the index forgets for want of room it takes nobody to
hold; like every wrong entry that costs time and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from libs.common import service_bounds
from services.router.prefix_index.radix_forest import ChainPath, RadixForest
from services.router.prefix_index.radix_node import ConfirmedBlocks, PredictedBlocks, Promised, leading_ones
from slipstream.block_view import EventCursor


class HolderView(EventCursor):
    """What one holder tells, up to `sequence` of `incarnation`."""

    def __init__(self, forest: RadixForest) -> None:
        super().__init__()
        self._forest = forest
        self.tiers: dict[int, ConfirmedBlocks] = {}
        self._incoming: dict[int, ConfirmedBlocks] = {}

    @property
    def blocks(self) -> int:
        """Entries, of all tiers."""
        return sum(told.n_blocks for told in self.tiers.values())

    def stored(self, tier: int, hashes: Sequence[bytes]) -> None:
        self._forest.stored(self.tiers.setdefault(tier, ConfirmedBlocks()), hashes)

    def removed(self, tier: int, hashes: Sequence[bytes]) -> None:
        if tier in self.tiers:
            self._forest.removed(self.tiers[tier], hashes)

    def in_snapshot(self, tier: int, hashes: Sequence[bytes]) -> None:
        self._forest.stored(self._incoming.setdefault(tier, ConfirmedBlocks()), hashes)

    def end_snapshot(self, *, complete: bool) -> None:
        gone = self._incoming
        if complete:
            gone, self.tiers = self.tiers, self._incoming
        self._incoming = {}
        for told in gone.values():
            self._forest.forget(told)

    def forget(self) -> None:
        """Nothing is held."""
        for told in (*self.tiers.values(), *self._incoming.values()):
            self._forest.forget(told)
        self.tiers, self._incoming = {}, {}


@dataclass(slots=True)
class _Holder:
    view: HolderView
    sent: PredictedBlocks = field(default_factory=PredictedBlocks)


class PrefixMatch:
    """What is known of one prompt, until the index changes."""

    __slots__ = ("_holders", "_now_s", "_path")

    def __init__(self, path: ChainPath, holders: dict[str, _Holder], *, now_s: float) -> None:
        self._path = path
        self._holders = holders
        self._now_s = now_s

    def blocks(self, holder: str, *, tier: int | None = None) -> int:
        """How many leading blocks the holder has or is about to have; with `tier`, has in that tier."""
        known = self._holders.get(holder) if self._path.runs else None
        if known is None:
            return 0
        tiers = known.view.tiers
        if tier is None:
            return self._prefix(tiers.values(), known.sent)
        return self._prefix((tiers[tier],), None) if tier in tiers else 0

    def _prefix(self, tiers: Iterable[ConfirmedBlocks], sent: PredictedBlocks | None) -> int:
        held = 0
        for run in self._path.runs:
            bits = 0
            for told in tiers:
                if told in run.told:
                    bits |= run.told[told]
            if sent is not None and sent in run.sent:
                bits |= _promised(run.sent[sent], self._now_s)
            if not bits:
                return held
            asked = min(run.n_blocks, self._path.blocks - run.first_block)
            n_blocks = leading_ones(bits)
            if n_blocks < asked:
                return held + n_blocks
            held += asked
        return held


def _promised(promised: Promised, now_s: float) -> int:
    """The blocks that a holder is about to have, as bits."""
    for n_blocks, until_s in promised:
        if until_s > now_s:
            return (1 << n_blocks) - 1
    return 0


class PrefixIndex:
    """Holders are any names. Bounded in bytes, for each tenant and in all."""

    def __init__(
        self,
        *,
        max_bytes: int = service_bounds.MAX_PREFIX_INDEX_BYTES,
        max_tenant_bytes: int = service_bounds.MAX_TENANT_PREFIX_INDEX_BYTES,
    ) -> None:
        self._forest = RadixForest(max_bytes=max_bytes, max_tenant_bytes=max_tenant_bytes)
        self._holders: dict[str, _Holder] = {}

    @property
    def blocks(self) -> int:
        """Different blocks that somebody has or is about to have."""
        return self._forest.trees.blocks

    @property
    def runs(self) -> int:
        """The runs that they lie in."""
        return self._forest.trees.runs

    @property
    def n_bytes(self) -> int:
        """All that is kept, about."""
        return self._forest.room.n_bytes

    @property
    def forgotten_blocks(self) -> int:
        """Blocks that were forgotten for want of room, so far."""
        return self._forest.trees.forgotten_blocks

    def gauges(self) -> dict[str, float]:
        """Its figures by metric name (libs/common/rpc/telemetry.py)."""
        return {
            "slipstream_prefix_index_bytes": float(self.n_bytes),
            "slipstream_prefix_index_blocks": float(self.blocks),
            "slipstream_prefix_index_forgotten_blocks_total": float(self.forgotten_blocks),
        }

    def tenant_bytes(self, tenant: str | None) -> int:
        """What is kept for a tenant; None: blocks of which workers told and that no prompt has named."""
        return self._forest.room.tenant_bytes(tenant)

    def check(self) -> None:
        """Raises Internal when the index contradicts itself."""
        self._forest.trees.check()

    @property
    def holders(self) -> frozenset[str]:
        """Those of which anything is or was known, until they are dropped."""
        return frozenset(self._holders)

    # ---- what holders say

    def view(self, holder: str) -> HolderView:
        """The holder's view, to apply its events to."""
        return self._holder(holder).view

    def knows(self, holder: str) -> bool:
        """Whether the holder has told what it holds."""
        known = self._holders.get(holder)
        return known is not None and bool(known.view.incarnation)

    def drop(self, holder: str) -> None:
        """The holder is gone. Idempotent."""
        known = self._holders.pop(holder, None)
        if known is not None:
            known.view.forget()
            self._forest.forget(known.sent)

    def _holder(self, name: str) -> _Holder:
        known = self._holders.get(name)
        if known is None:
            known = self._holders[name] = _Holder(HolderView(self._forest))
        return known

    # ---- what was sent

    def predict(
        self, holder: str, hashes: Sequence[bytes], *, tenant: str, now_s: float, ttl_s: float
    ) -> None:
        """The holder will soon hold these, in prompt order, all of them for so long. Costs what is new."""
        if hashes:
            sent = self._holder(holder).sent
            self._forest.promise(sent, hashes, tenant=tenant, now_s=now_s, until_s=now_s + ttl_s)

    def tidy(self, now_s: float, *, most_blocks: int = 1024) -> bool:
        """Clear away some of what is over, in a millisecond or two; returns whether there may be more.
        Predictions do it too, a little each."""
        return self._forest.tidy(now_s, most_blocks=most_blocks)

    # ---- lookups

    def find(self, hashes: Sequence[bytes], *, tenant: str, now_s: float) -> PrefixMatch:
        """What is known of a tenant's prompt."""
        return PrefixMatch(self._forest.find(hashes, tenant=tenant), self._holders, now_s=now_s)

    def prefix_blocks(
        self, holder: str, hashes: Sequence[bytes], *, now_s: float, tier: int | None = None, tenant: str = ""
    ) -> int:
        """`find` for one holder alone."""
        return self.find(hashes, tenant=tenant, now_s=now_s).blocks(holder, tier=tier)
