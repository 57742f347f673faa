"""Fixed-size slots in slabs, the blocks in them, and which block goes when room is needed. Pure.

A slab is a piece of registered memory. It is cut into slots of one size, page-rounded, and can be cut again
when every block in it may go. The disks have another table (`disk/table/table.py`).

    free slot --allocate--> taken --publish--> block --evict or drop--> free slot
                              \\___free________________________________/

A block that is held is never evicted. Which of the others goes, and which new block is worth a slot at all
when there is no room, says the eviction policy of its slot size (`policy/adaptive.py`). Chains shrink from
their end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from libs.common.transport.registered_memory import page_rounded
from services.kvstore.dram.quota import MemoryQuota
from services.kvstore.policy.adaptive import AdaptivePolicy
from services.kvstore.policy.quota import NO_TENANT

ValueT = TypeVar("ValueT")


@dataclass(frozen=True, slots=True)
class Slot:
    """Slot `index` of slab `slab`; `slot_bytes` is its payload's capacity."""

    slab: int
    index: int
    slot_bytes: int

    def __hash__(self) -> int:
        return self.slab << 24 ^ self.index


@dataclass(slots=True, eq=False)
class Block(Generic[ValueT]):
    """A published block. `holds` counts those who need it to stay; `gone` after eviction or drop."""

    key: bytes
    slot: Slot
    n_bytes: int
    value: ValueT
    holds: int = 0
    gone: bool = False
    named: bool = False  # the policy wanted it to go while it was held


@dataclass(slots=True)
class _MemorySlab:
    slot_bytes: int = 0  # 0: not cut yet
    taken: int = 0  # slots that are not free
    blocks: set[bytes] = field(default_factory=set)


class SlotTable(Generic[ValueT]):
    """The slots of one tier and the blocks in them."""

    def __init__(self, *, n_slabs: int, slab_bytes: int, tenant_share: float = 1.0) -> None:
        """`tenant_share`: the part of all slots that one tenant may fill."""
        whole = n_slabs * slab_bytes
        self.quota = MemoryQuota(int(whole * tenant_share)) if tenant_share < 1.0 else None
        self.slab_bytes = slab_bytes
        self._slabs = [_MemorySlab() for _ in range(n_slabs)]
        self._uncut = list(reversed(range(n_slabs)))
        self._free: dict[int, list[Slot]] = {}
        self._blocks: dict[bytes, Block[ValueT]] = {}
        self._policies: dict[int, AdaptivePolicy] = {}
        self._n_held = 0
        self._unpublished: dict[Slot, bytes] = {}  # and the tenant it was taken for
        self._last_slot_bytes = 0
        self._held_gone = 0
        self.evictions = 0
        # Receives every block that is added (True) or removed (False), at once.
        self.on_change: Callable[[bytes, bool], None] = _ignore

    @property
    def n_slabs(self) -> int:
        """Slabs of the tier, whether cut or not."""
        return len(self._slabs)

    @property
    def n_blocks(self) -> int:
        """Published blocks."""
        return len(self._blocks)

    @property
    def n_evictable(self) -> int:
        """Published blocks without a holder."""
        return len(self._blocks) - self._n_held

    @property
    def n_free(self) -> int:
        """Slots to be had without evicting; slabs not cut yet count at the size last asked for."""
        uncut = len(self._uncut) * self.slots_per_slab(self._last_slot_bytes) if self._last_slot_bytes else 0
        return uncut + sum(len(free) for free in self._free.values())

    @property
    def n_bytes(self) -> int:
        """Payload bytes of all blocks."""
        return sum(block.n_bytes for block in self._blocks.values())

    @property
    def max_block_bytes(self) -> int:
        """The largest payload a slot can have."""
        return self.slab_bytes if self._slabs else 0

    def keys(self) -> list[bytes]:
        """The hashes of all published blocks."""
        return list(self._blocks)

    def slots_per_slab(self, slot_bytes: int) -> int:
        """How many slots of that size a slab has."""
        return self.slab_bytes // slot_bytes

    def held(self, chain: Sequence[bytes]) -> list[bool]:
        """Whether each block of the chain is there; quicker than one by one."""
        blocks = self._blocks
        return [key in blocks for key in chain]

    def get(self, key: bytes) -> Block[ValueT] | None:
        """The block, or None."""
        return self._blocks.get(key)

    @property
    def policies(self) -> Mapping[int, AdaptivePolicy]:
        """The policies of the block sizes that there are, by slot size."""
        return self._policies

    @property
    def rewanted(self) -> tuple[int, float]:
        """Blocks that were evicted and then wanted, and the sum of the times between, in ms."""
        policies = self._policies.values()
        return sum(p.rewanted_blocks for p in policies), sum(p.rewanted_gap_ms for p in policies)

    @property
    def policy_changes(self) -> int:
        """How often a tier began to follow another policy."""
        return sum(policy.changes for policy in self._policies.values())

    @property
    def policies_followed(self) -> list[str]:
        """The names of the policies that the sizes of blocks follow."""
        return sorted({policy.followed for policy in self._policies.values()})

    def expected_reuse(self, block: Block[ValueT]) -> float:
        """How likely the block is wanted again, 0 to 1."""
        return self.policy(block.slot.slot_bytes).expected_reuse(block.key)

    def policy(self, slot_bytes: int) -> AdaptivePolicy:
        """The policy of the blocks of one slot size."""
        policy = self._policies.get(slot_bytes)
        if policy is None:
            policy = self._policies[slot_bytes] = AdaptivePolicy(self._capacity(slot_bytes))
        return policy

    def offer(self, keys: Sequence[bytes], n_bytes: int) -> list[bytes]:
        """The blocks, in the order of their chain, that are worth what must go for them."""
        slot_bytes = page_rounded(n_bytes)
        if n_bytes < 1 or not self.slots_per_slab(slot_bytes):
            return list(keys)
        policy = self.policy(slot_bytes)
        kept = policy.offer(keys)
        if len(kept) < len(keys) and self._room(slot_bytes) >= len(keys):
            return list(keys)
        # A size that has no slab yet takes one from another size.
        return kept if policy.capacity_blocks else list(keys)

    def allocate(self, n_bytes: int, *, tenant: bytes = NO_TENANT) -> Slot | None:
        """A slot for `n_bytes`, evicting what may go; None when nothing may, or too much is the tenant's."""
        slot_bytes = page_rounded(n_bytes)
        if n_bytes < 1 or not self.slots_per_slab(slot_bytes):
            return None
        self._last_slot_bytes = slot_bytes
        if not self._make_tenant_room(tenant, slot_bytes):
            return None
        free = self._free.setdefault(slot_bytes, [])
        if not free:
            self._make_room(slot_bytes)
        if not free:
            return None
        slot = free.pop()
        self._slabs[slot.slab].taken += 1
        self._unpublished[slot] = tenant
        if self.quota is not None:
            self.quota.add(tenant, slot_bytes)
        return slot

    def publish(self, key: bytes, slot: Slot, n_bytes: int, value: ValueT) -> Block[ValueT]:
        """Publish the taken slot as block `key`, without a holder. ValueError if there is one."""
        if key in self._blocks:
            raise ValueError(f"block {key.hex()} is there already")
        tenant = self._unpublished.pop(slot)
        if self.quota is not None:
            self.quota.publish(tenant, key, slot.slot_bytes)
        block = self._blocks[key] = Block(key, slot, n_bytes, value)
        self._slabs[slot.slab].blocks.add(key)
        self.policy(slot.slot_bytes).publish(key)
        self.on_change(key, True)
        return block

    def free(self, slot: Slot) -> None:
        """Give a taken slot back that was not published."""
        tenant = self._unpublished.pop(slot)
        if self.quota is not None:
            self.quota.add(tenant, -slot.slot_bytes)
        self._release_slot(slot)

    def hold(self, block: Block[ValueT]) -> None:
        """The block stays until `unhold` was called as often."""
        block.holds += 1
        self._n_held += block.holds == 1 and not block.gone

    def unhold(self, block: Block[ValueT]) -> None:
        """Undo one hold; after the last one the block may go."""
        if block.holds < 1:
            raise ValueError(f"block {block.key.hex()} is not held")
        block.holds -= 1
        if block.holds:
            return
        if block.gone:
            self._held_gone -= 1
            self._release_slot(block.slot)
            return
        self._n_held -= 1
        if block.named:
            block.named = False
            self.policy(block.slot.slot_bytes).spared(block.key)

    def touch(self, chain: Sequence[bytes], *, tenant: bytes = NO_TENANT, now_ms: float = 0.0) -> None:
        """A request wanted the blocks of the chain, whether they are here or not."""
        if self.quota is not None:
            self.quota.want(chain, tenant)
        if not chain or not self._policies:
            return
        found = (policy for policy in self._policies.values() if policy.knows(chain[0]))
        usual = self._policies.get(self._last_slot_bytes) or self.policy(min(self._policies))
        next(found, usual).want(chain, now_ms=now_ms)

    def drop(self, block: Block[ValueT]) -> None:
        """The block is no longer there. Its slot becomes free without a holder."""
        if block.gone:
            return
        self.policy(block.slot.slot_bytes).discard(block.key)
        self._remove(block)

    def _remove(self, block: Block[ValueT]) -> None:
        block.gone = True
        del self._blocks[block.key]
        self._slabs[block.slot.slab].blocks.remove(block.key)
        if self.quota is not None:
            self.quota.discard(block.key)
        if block.holds:
            self._held_gone += 1
            self._n_held -= 1
        else:
            self._release_slot(block.slot)
        self.on_change(block.key, False)

    def check(self) -> None:
        """AssertionError unless every slot is free, taken or a block, and counted once."""
        taken = [0] * len(self._slabs)
        for slot in [*self._unpublished, *(block.slot for block in self._blocks.values())]:
            taken[slot.slab] += 1
        for number, slab in enumerate(self._slabs):
            free = sum(s.slab == number for slots in self._free.values() for s in slots)
            assert not slab.slot_bytes or free + slab.taken == self.slots_per_slab(slab.slot_bytes)
            assert 0 <= slab.taken - taken[number] <= self._held_gone
        assert sum(slab.taken for slab in self._slabs) - sum(taken) == self._held_gone
        assert self._n_held == sum(block.holds > 0 for block in self._blocks.values())
        for policy in self._policies.values():
            policy.check()

    def _room(self, slot_bytes: int) -> int:
        """Slots of that size to be had without evicting."""
        return len(self._free.get(slot_bytes, ())) + len(self._uncut) * self.slots_per_slab(slot_bytes)

    def _capacity(self, slot_bytes: int) -> int:
        """Slots of that size there are, or could be cut from unused memory."""
        cut = sum(slab.slot_bytes == slot_bytes for slab in self._slabs)
        return (cut + len(self._uncut)) * self.slots_per_slab(slot_bytes)

    def _resize_policies(self) -> None:
        for slot_bytes, policy in self._policies.items():
            policy.resize(self._capacity(slot_bytes))

    def _release_slot(self, slot: Slot) -> None:
        slab = self._slabs[slot.slab]
        slab.taken -= 1
        self._free.setdefault(slot.slot_bytes, []).append(slot)

    def _make_room(self, slot_bytes: int) -> None:
        """Free a slot of that size: a new slab, the block that the policy names, or another size's slab."""
        if self._uncut:
            self._cut(self._uncut.pop(), slot_bytes)
            return
        if self._evict(slot_bytes):
            return
        candidates = [number for number, slab in enumerate(self._slabs) if self._may_be_cut_again(slab)]
        if candidates:
            chosen = min(candidates, key=lambda number: self._slabs[number].taken)
            doomed = [self._blocks[key] for key in self._slabs[chosen].blocks]
            self.evictions += len(doomed)
            for block in doomed:
                self.drop(block)
            self._drop_free_slots(chosen)
            self._cut(chosen, slot_bytes)

    def _evict(self, slot_bytes: int) -> bool:
        """Evict the block of that size that the policy names; False when none may go."""
        policy = self.policy(slot_bytes)
        while self.n_evictable and (key := policy.choose_victim()) is not None:
            block = self._blocks.get(key)
            if block is None or block.slot.slot_bytes != slot_bytes:
                continue
            if block.holds:
                block.named = True
                continue
            self._evict_block(block)
            return True
        return False

    def _evict_block(self, block: Block[ValueT]) -> None:
        self.evictions += 1
        self.policy(block.slot.slot_bytes).evicted(block.key)
        self._remove(block)

    def _make_tenant_room(self, tenant: bytes, slot_bytes: int) -> bool:
        """Evict blocks of the tenant until it may take the slot; False when they do not suffice."""
        quota = self.quota
        if quota is None:
            return True

        def evict_one() -> bool:
            own = (self._blocks[key] for key in quota.own(tenant))
            block = next((block for block in own if not block.holds), None)
            if block is not None:
                self._evict_block(block)
            return block is not None

        return quota.make_room(tenant, slot_bytes, evict_one)

    def _may_be_cut_again(self, slab: _MemorySlab) -> bool:
        return slab.taken == len(slab.blocks) and not any(self._blocks[key].holds for key in slab.blocks)

    def _cut(self, number: int, slot_bytes: int) -> None:
        self._slabs[number].slot_bytes = slot_bytes
        count = self.slots_per_slab(slot_bytes)
        self._free.setdefault(slot_bytes, []).extend(
            Slot(number, i, slot_bytes) for i in reversed(range(count))
        )
        self._resize_policies()

    def _drop_free_slots(self, number: int) -> None:
        size = self._slabs[number].slot_bytes
        if size in self._free:
            self._free[size][:] = [slot for slot in self._free[size] if slot.slab != number]


def _ignore(key: bytes, held: bool) -> None:
    return
