"""Which block of a tier goes when room is needed, and which is not worth taking in. Pure.

Several well-known policies run as simulated caches beside each other, on all blocks or, where there are
many, on a sample by hash at a capacity that is as much smaller (miniature simulation: Waldspurger,
Saemundsson, Ahmad and Park, USENIX ATC 2017). The live policy of the tier is the one whose simulated cache
gets the most hits (docs/adr/0010-choose-eviction-policy-by-shadow-caches.md).

    want      a request wanted a chain            -> the simulated caches serve it and are compared
    offer     blocks are there to be stored       -> those that the live policy keeps
    publish   a block is in the tier              discard   it is not any more
    victim    room is needed                      -> the next block to go
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from services.kvstore.policy.arc import ArcPolicy
from services.kvstore.policy.base import EvictionPolicy, Floats, Ints
from services.kvstore.policy.history import BlockRecord, History
from services.kvstore.policy.hit_density import HitDensityPolicy
from services.kvstore.policy.lru import LruPolicy
from services.kvstore.policy.reuse import ReuseModel
from services.kvstore.policy.s3fifo import S3FifoPolicy

# Up to so many blocks a simulated cache has the tier's capacity and sees every block.
SIMULATED_BLOCKS = 1024
# Blocks that a policy takes over from the one before it at each want, so that no want takes long.
ADOPT_BLOCKS = 8192
# After so many capacities of wanted blocks a hit counts half.
HALF_LIFE_CAPACITIES = 64
# Hits by which another policy must lead to be followed: a part of the capacity, and at least so many.
MARGIN_PART = 1 / 128
MIN_MARGIN_BLOCKS = 8.0


class AdaptivePolicy:
    """The policy of one tier and one block size."""

    def __init__(self, capacity_blocks: int, *, simulated_blocks: int = SIMULATED_BLOCKS) -> None:
        self.capacity_blocks = capacity_blocks
        self.sample_rate = max(1, -(-capacity_blocks // simulated_blocks))
        self.history = History(capacity_blocks, sample_rate=self.sample_rate)
        self.model = ReuseModel(self.history)
        simulated_capacity = capacity_blocks // self.sample_rate
        self._simulated = [
            self._new(policy, simulated_capacity)
            for policy in (LruPolicy, ArcPolicy, S3FifoPolicy, HitDensityPolicy)
        ]
        self._selector = PolicySelector(len(self._simulated), capacity_blocks)
        self.live = self._live_of(self._simulated[0])
        self._condemned: OrderedDict[BlockRecord, None] = OrderedDict()
        self._before: EvictionPolicy | None = None  # from which the live policy takes over, a few at a time
        self._to_adopt: Iterator[BlockRecord] = iter(())
        self._is_swept = False
        self._now_ms = 0.0
        self.rewanted_blocks = 0  # evicted, and then wanted
        self.rewanted_gap_ms = 0.0  # the sum of the times between

    @property
    def changes(self) -> int:
        """How often the tier began to follow another policy."""
        return self._selector.changes

    def knows(self, key: bytes) -> bool:
        """Whether the block was wanted or offered, as far as remembered."""
        return self.history.get(key) is not None

    def want(self, chain: Sequence[bytes], *, now_ms: float = 0.0) -> None:
        """A request wanted the blocks of the chain, from its start on."""
        self._now_ms = now_ms
        path, waits = self.history.want(chain)
        self.model.record(waits, wanted=True)
        self._count_rewanted(path)
        self._serve(path)
        self._forget_old()
        self.model.learn_if_due()

    def offer(self, keys: Sequence[bytes]) -> list[bytes]:
        """Blocks that could be stored, each after the one before it in its chain; those worth it."""
        records = [self._known(key) for key in keys]
        held = self.live.held
        missing = [record for record in records if record not in held]
        if missing:
            self._take(missing)
        return [record.key for record in records if record in held]

    def publish(self, key: bytes) -> None:
        """The block is in the tier now."""
        record = self._known(key)
        if not record.present:
            record.present = True
            record.holders += 1
        if record not in self.live.held:
            self._take([record])
            if record not in self.live.held:
                self._condemned[record] = None
        if len(self.history) > self.history.max_blocks:
            self._forget_old()

    def discard(self, key: bytes) -> None:
        """The block is not in the tier any more. The live policy goes on as if it were."""
        record = self.history.get(key)
        if record is not None and record.present:
            record.present = False
            record.holders -= 1
            self._condemned.pop(record, None)

    def evicted(self, key: bytes) -> None:
        """The block is not in the tier any more because the policy named it."""
        record = self.history.get(key)
        if record is not None:
            record.evicted_ms = self._now_ms
            if record.present:
                self.discard(key)

    def victim(self) -> bytes | None:
        """A block to evict next; None once all were named. A block that was named and stays, because it is
        held, is named again after all others, or after `spared`."""
        while True:
            while self._condemned:
                record, _ = self._condemned.popitem(last=False)
                return record.key
            while len(self.live):
                record = self.live.evict()
                if record.present:
                    return record.key
            if self._is_swept:
                self._is_swept = False
                return None
            self._is_swept = True
            self._condemn(self._strangers())

    def spared(self, key: bytes) -> None:
        """The block that was named is still there: it was held, and is not any more."""
        record = self.history.get(key)
        if record is None or not record.present or record in self.live:
            return
        if len(self.live) < self.live.capacity_blocks:
            self.live.adopt(record)
            self._condemned.pop(record, None)
        else:
            self._condemned[record] = None

    def expected_reuse(self, key: bytes) -> float:
        """How likely the block is wanted again, 0 to 1, as far as is known."""
        record = self.history.get(key)
        return 0.0 if record is None else self.model.reuse[record.kind]

    def kind(self, key: bytes) -> int:
        """The kind of a block that is remembered."""
        record = self.history.get(key)
        if record is None:
            raise KeyError(key.hex())
        return record.kind

    def place(self, key: bytes) -> tuple[bytes | None, int, int] | None:
        """The block before this one in its chain, how many are before it, and its kind; None if unknown."""
        record = self.history.get(key)
        if record is None:
            return None
        return record.parent.key if record.parent is not None else None, record.depth, record.kind

    def values(self, kinds: Ints, ages: Ints) -> Floats:
        """What keeping blocks of these kinds and ages is worth to the policy that is followed."""
        return self.live.values(kinds, ages)

    def resize(self, capacity_blocks: int) -> None:
        """The tier has room for so many blocks from now on."""
        self.capacity_blocks = capacity_blocks
        self.history.resize(capacity_blocks)
        self._selector.resize(capacity_blocks)
        for policy in self._simulated:
            policy.capacity_blocks = capacity_blocks // self.sample_rate
            policy.trim()
        self.live.capacity_blocks = capacity_blocks
        self._condemn(self.live.trim())

    def follow(self, number: int) -> None:
        """Follow the policy of that number, in the order LRU, ARC, S3-FIFO, hit density."""
        self._selector.leader = number
        self._adopt_all()
        before, self.live = self.live, self._live_of(self._simulated[number])
        self._before = before
        self._to_adopt = iter(list(self.history.records()))

    def pin(self, number: int) -> None:
        """Follow the policy of that number for ever."""
        self.follow(number)
        self._selector.is_pinned = True

    def check(self) -> None:
        """AssertionError unless caches and holders are counted right."""
        caches = (*self._simulated, self.live, *([self._before] if self._before is not None else ()))
        policies = {id(policy): policy for policy in caches}.values()
        for policy in policies:
            policy.check()
        for record in self.history.records():
            holders = sum(record in policy for policy in policies) + record.present
            assert record.holders == holders
        assert all(record.present for record in self._condemned)

    def _new(self, policy: type[EvictionPolicy], capacity_blocks: int) -> EvictionPolicy:
        if policy is HitDensityPolicy:
            return HitDensityPolicy(capacity_blocks, self.history, self.model)
        return policy(capacity_blocks, self.history)

    def _live_of(self, simulated: EvictionPolicy) -> EvictionPolicy:
        """One of the same policy and the whole size."""
        live = self._new(type(simulated), self.capacity_blocks)
        live.follow(simulated, self.sample_rate)
        return live

    def _serve(self, path: Sequence[BlockRecord]) -> None:
        sampled = path if self.sample_rate == 1 else [record for record in path if record.sampled]
        if sampled:
            hits = [policy.count_hits(sampled) * self.sample_rate for policy in self._simulated]
            leader = self._selector.judge(hits, len(path))
            for policy in self._simulated:
                policy.serve(sampled)
            if leader is not None:
                self.follow(leader)
        if self._before is not None:
            self._adopt(path)
            if self._adopt(islice(self._to_adopt, ADOPT_BLOCKS)) < ADOPT_BLOCKS:
                self._adopt_all()
        self._condemn(self.live.serve(path))
        if self._condemned:
            for record in path:
                if record in self.live.held:
                    self._condemned.pop(record, None)

    def _adopt(self, records: Iterable[BlockRecord]) -> int:
        """Take over those of the records that the policy before held; how many were looked at."""
        looked, live, before = 0, self.live, self._before
        for record in records:
            looked += 1
            if record.present and before is not None and record in before.held and record not in live.held:
                live.adopt(record)
        self._condemn(live.trim())
        return looked

    def _adopt_all(self) -> None:
        if self._before is not None:
            self._adopt(self._to_adopt)
            self._before.release()
            self._before = None

    def _take(self, missing: Sequence[BlockRecord]) -> None:
        """Blocks are there to be stored that the live policy does not hold yet, or not any more."""
        new = [record for record in missing if record.sampled and not record.holders - record.present]
        for policy in self._simulated:
            if new:
                policy.serve(new)
        self._condemn(self.live.serve(missing))
        for record in missing:
            if record in self.live:
                self._condemned.pop(record, None)

    def _condemn(self, records: Iterable[BlockRecord]) -> None:
        """Those of them that are in the tier go before all that the live policy holds."""
        for record in records:
            if record.present:
                self._condemned[record] = None

    def _strangers(self) -> list[BlockRecord]:
        """Blocks that are in the tier and not in the live policy, the ends of chains first."""
        found = [
            record for record in self.history.records() if record.present and record not in self.live.held
        ]
        return sorted(found, key=lambda record: (record.last, -record.depth))

    def _forget_old(self) -> None:
        if len(self.history) > self.history.max_blocks:
            self.model.record(self.history.forget_old(), wanted=False)

    def _known(self, key: bytes) -> BlockRecord:
        return self.history.get(key) or self.history.begin(key)

    def _count_rewanted(self, path: Sequence[BlockRecord]) -> None:
        for record in path:
            if record.evicted_ms >= 0:
                self.rewanted_blocks += 1
                self.rewanted_gap_ms += self._now_ms - record.evicted_ms
                record.evicted_ms = -1.0


class PolicySelector:
    """Compares the hits of the simulated caches, of which older ones count less."""

    def __init__(self, n_policies: int, capacity_blocks: int) -> None:
        self.leader = 0
        self.changes = 0
        self.is_pinned = False  # the leader stays
        self._hits = [0.0] * n_policies
        self.resize(capacity_blocks)

    def resize(self, capacity_blocks: int) -> None:
        """Judge by the half-life and the margin of this capacity from now on."""
        self._half_life = HALF_LIFE_CAPACITIES * max(1, capacity_blocks)
        self._margin = max(MIN_MARGIN_BLOCKS, capacity_blocks * MARGIN_PART)

    def judge(self, hits: Sequence[int], n_blocks: int) -> int | None:
        """The policy to follow from now on, if it is another one. `hits`: those of a chain of `n_blocks`."""
        kept = 0.5 ** (n_blocks / self._half_life)
        sums = self._hits = [kept * before + found for before, found in zip(self._hits, hits, strict=True)]
        best = max(sums)
        if best - sums[self.leader] <= self._margin or self.is_pinned:
            return None
        self.changes += 1
        return sums.index(best)
