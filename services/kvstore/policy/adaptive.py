"""Which block of a tier goes when room is needed, and which is not worth taking in. Pure.

Several well-known policies run as simulated caches beside each other, and hits give each a weight
(ADR 0010). A block is worth the weights of the caches that hold it; the tier evicts what is worth least.
Above SIMULATED_BLOCKS they see a sample by hash at a capacity that is as much smaller (miniature simulation:
Waldspurger, Saemundsson, Ahmad and Park, USENIX ATC 2017), and the tier follows one cache beside them, of the
leader's policy.

    want      a request wanted a chain            -> the simulated caches serve it and are weighed
    offer     blocks are there to be stored       -> those that are worth what must go for them
    publish   a block is in the tier              discard   it is not any more
    chained   blocks were published as one chain  -> they leave from its end on
    choose_victim  room is needed             -> the next block to go
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from services.kvstore.policy.arc import ArcPolicy
from services.kvstore.policy.base import EvictionPolicy
from services.kvstore.policy.history import N_KINDS, BlockRecord, History
from services.kvstore.policy.hit_density import HitDensityPolicy
from services.kvstore.policy.lru import LruPolicy
from services.kvstore.policy.reuse import Floats, Ints, ReuseModel
from services.kvstore.policy.s3fifo import S3FifoPolicy
from services.kvstore.policy.weights import PolicyWeights
from services.kvstore.policy.worth import WorthQueues

# Up to so many blocks a simulated cache has the tier's capacity and sees every block.
SIMULATED_BLOCKS = 32_768
# The policies by number; after them hit density.
_PAPERS: tuple[Callable[..., EvictionPolicy], ...] = (LruPolicy, ArcPolicy, S3FifoPolicy)
HIT_DENSITY = len(_PAPERS)
N_POLICIES = HIT_DENSITY + 1
POLICY_NAMES = ("LRU", "ARC", "S3-FIFO", "hit density")
# Their weights while their hits are equal. Hit density outweighs the others together: a change to it costs
# most, because it keeps old blocks. LRU is next: the others seldom lead it by much where it leads them.
START_WEIGHTS = (3.0, 1.0, 1.0, 5.5)
# Where the simulated caches see a sample, the tier follows one more cache.
_ONE_CACHE = (1.0, *([0.0] * (N_POLICIES - 1)))
# The weight of one eviction in the mean age at which blocks of a kind leave.
_LIFETIME_WEIGHT = 1 / 64


class AdaptivePolicy:
    """The policy of one tier and one block size."""

    def __init__(self, capacity_blocks: int, *, simulated_blocks: int = SIMULATED_BLOCKS) -> None:
        self.capacity_blocks = capacity_blocks
        self._simulated_blocks = simulated_blocks
        self.sample_rate = self._rate(capacity_blocks)
        self.history = History(capacity_blocks, sample_rate=self.sample_rate)
        self.model = ReuseModel(self.history)
        self._weights = PolicyWeights(START_WEIGHTS, capacity_blocks)
        self._blocks = WorthQueues(self._weights.values)
        self._start_caches()
        self._lifetimes = [0.0] * N_KINDS  # the mean age of what `live` evicted; 0: nothing
        self._now_ms = 0.0
        self.rewanted_blocks = 0  # evicted, and then wanted
        self.rewanted_gap_ms = 0.0  # the sum of the times between

    @property
    def changes(self) -> int:
        """How often another policy became the one with the most weight."""
        return self._weights.changes

    def knows(self, key: bytes) -> bool:
        """Whether the block was wanted or offered, as far as remembered."""
        return self.history.get(key) is not None

    def want(self, chain: Sequence[bytes], *, now_ms: float = 0.0) -> None:
        """A request wanted the blocks of the chain, from its start on."""
        self._now_ms = now_ms
        path, waits = self.history.want(chain)
        self.model.record(waits, wanted=True)
        self._count_rewanted(path)
        leader = self._weights.leader
        if self._weights.judge(self._serve(path), len(path)):
            self._weigh()
            if self._weights.leader != leader:
                self._follow_leader()
        self._drop_old()
        self.model.learn_if_due()

    def offer(self, keys: Sequence[bytes]) -> list[bytes]:
        """Blocks that could be stored, each after the one before it in its chain; those worth it."""
        get = self.history.get
        new = [key for key in dict.fromkeys(keys) if get(key) is None]
        if new:
            self._begin(new)
        records = [record for record in map(get, keys) if record is not None]
        kept = self._blocks.kept(records, self.capacity_blocks - len(self._blocks))
        return [record.key for record in kept]

    def publish(self, key: bytes) -> None:
        """The block is in the tier now."""
        self._blocks.enqueue(self.history.get(key) or self._begin([key])[0])
        self._drop_old()

    def chained(self, keys: Sequence[bytes]) -> None:
        """The published blocks are a chain, in its order: the last one leaves first."""
        for record in map(self.history.get, reversed(keys)):
            if record is not None and record.queue is not None:
                self._blocks.enqueue(record)

    def discard(self, key: bytes) -> None:
        """The block is not in the tier any more. The caches go on as if it were."""
        record = self.history.get(key)
        if record is not None:
            self._blocks.remove(record)

    def evicted(self, key: bytes) -> None:
        """The block is not in the tier any more because the policy named it."""
        record = self.history.get(key)
        if record is not None:
            record.evicted_ms = self._now_ms
            self.discard(key)

    def choose_victim(self) -> bytes | None:
        """A block to evict next; None once all were named. A block that was named and stays, because it is
        held, is named again after all others, or after `spared`."""
        record = self._blocks.next()
        return None if record is None else record.key

    def spared(self, key: bytes) -> None:
        """The block that was named is still there: it was held, and is not any more."""
        record = self.history.get(key)
        if record is not None:
            self._blocks.spared(record)

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

    def location(self, key: bytes) -> tuple[bytes | None, int, int] | None:
        """The block before this one in its chain, how many are before it, and its kind; None if unknown."""
        record = self.history.get(key)
        if record is None:
            return None
        return record.parent.key if record.parent is not None else None, record.depth, record.kind

    def values(self, kinds: Ints, ages: Ints) -> Floats:
        """What keeping blocks of these kinds and ages is worth to the policy that is followed.

        Of ARC and S3-FIFO no more is known than the mean age at which each kind leaves."""
        if isinstance(self.live, LruPolicy):
            return -ages.astype(float)
        if isinstance(self.live, HitDensityPolicy):
            return self.model.values_of(kinds, ages)
        lifetimes = np.array(self._lifetimes)
        lifetimes[lifetimes == 0] = max(1.0, lifetimes.max())
        found: Floats = -ages / lifetimes[kinds]
        return found

    def resize(self, capacity_blocks: int) -> None:
        """Set the number of blocks that the tier has room for."""
        self.capacity_blocks = capacity_blocks
        self._weights.resize(capacity_blocks)
        rate, before = self._rate(capacity_blocks), self.sample_rate
        is_near = before < 2 * rate < 4 * before
        self.history.resize(capacity_blocks, sample_rate=before if is_near else rate)
        if not is_near:
            self._sample_again(rate)
        for policy in self._simulated:
            policy.resize(self._simulated_capacity)
        self.live.resize(capacity_blocks)
        self._note_evicted()

    @property
    def followed(self) -> str:
        """The name of the policy with the most weight."""
        return POLICY_NAMES[self._weights.leader]

    def fix_policy(self, number: int) -> None:
        """Follow only the policy of that number, for ever."""
        self._weights.fix_policy(number)
        self._weigh()
        self._follow_leader()

    def check(self) -> None:
        """AssertionError unless caches and blocks are counted right."""
        for policy in {policy.bit: policy for policy in (*self._simulated, self.live)}.values():
            policy.check()
            assert len(policy) == sum(record in policy for record in self.history.records())
        for record in self.history.records():
            self._blocks.check(record)
        assert len(self._blocks) == sum(record.present for record in self.history.records())

    @property
    def _simulated_capacity(self) -> int:
        return self.capacity_blocks // self.sample_rate

    def _rate(self, capacity_blocks: int) -> int:
        return max(1, -(-capacity_blocks // self._simulated_blocks))

    def _start_caches(self) -> None:
        """Begin with empty caches. The first bits are those of the caches that the tier follows."""
        first = 0 if self.sample_rate == 1 else N_POLICIES
        self._simulated = [
            self._new(number, self._simulated_capacity, bit=1 << first + number)
            for number in range(N_POLICIES)
        ]
        self._weigh()
        self._follow_leader()

    def _weigh(self) -> None:
        self._blocks.weigh(self._weights.values if self.sample_rate == 1 else _ONE_CACHE)

    def _follow_leader(self) -> None:
        """Let `live` be the leader's cache: the simulated one if it sees every block, else an empty one."""
        leader = self._weights.leader
        if self.sample_rate == 1:
            self.live = self._simulated[leader]
            return
        for record in self.history.records():
            record.held &= ~1
        self.live = self._new(leader, self.capacity_blocks, bit=1)
        self._enqueue_all()

    def _new(self, number: int, capacity_blocks: int, *, bit: int) -> EvictionPolicy:
        if number == HIT_DENSITY:
            return HitDensityPolicy(capacity_blocks, self.history, self.model, bit=bit)
        return _PAPERS[number](capacity_blocks, bit=bit)

    def _enqueue_all(self) -> None:
        for record in self.history.records():
            if record.queue is not None:
                self._blocks.enqueue(record)

    def _serve(self, path: Sequence[BlockRecord]) -> list[int]:
        """Serve the chain in all caches; the hits of the simulated ones."""
        rate = self.sample_rate
        sampled = path if rate == 1 else [record for record in path if record.sampled]
        hits = [policy.serve(sampled) * rate for policy in self._simulated]
        if rate != 1:
            self.live.serve(path)
        self._note_evicted()
        for record in reversed(path):
            if record.queue is not None:
                self._blocks.enqueue(record)
        return hits

    def _begin(self, keys: Sequence[bytes]) -> list[BlockRecord]:
        """Records of blocks that no request wanted."""
        path = [self.history.begin(key) for key in keys]
        self._serve(path)
        return path

    def _note_evicted(self) -> None:
        """Put what the caches evicted where it belongs now."""
        now, lifetimes = self.history.now, self._lifetimes
        for record in self.live.evicted:
            age, lifetime = now - record.last, lifetimes[record.kind]
            lifetimes[record.kind] = lifetime + (age - lifetime) * _LIFETIME_WEIGHT if lifetime else age
        for policy in (*self._simulated, self.live):
            for record in policy.evicted:
                if record.queue is not None:
                    self._blocks.enqueue(record)
            policy.evicted.clear()

    def _sample_again(self, rate: int) -> None:
        """Begin with empty caches that see one block in `rate`; what the tier has leaves before the new."""
        self.sample_rate = rate
        for record in self.history.records():
            record.sampled = self.history.is_sampled(record.key)
            record.held = 0
        self._start_caches()
        self._enqueue_all()

    def _drop_old(self) -> None:
        if len(self.history) > self.history.max_blocks:
            self.model.record(self.history.drop_old(), wanted=False)

    def _count_rewanted(self, path: Sequence[BlockRecord]) -> None:
        for record in path:
            if record.evicted_ms >= 0:
                self.rewanted_blocks += 1
                self.rewanted_gap_ms += self._now_ms - record.evicted_ms
                record.evicted_ms = -1.0
