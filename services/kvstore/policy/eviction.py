"""Which block goes when a tier needs room, and which block is not worth taking in. Pure.

Two caches are simulated beside each other, LRU and one that goes by learned reuse, and the tier does as
the leader does. It starts with LRU, changes to the other when that has gained more hits than a change can
cost, and back likewise; a change that did not pay makes the next one dearer. So what the tier can lose to
LRU is a small part of its capacity, whatever the load is
(docs/adr/0010-eviction-is-a-duel-of-lru-and-learned-reuse.md).

    want      a request wanted a chain            -> both learn, the duel is counted
    offer     blocks are there to be stored       -> those that the leader would keep
    publish   a block is in the tier              discard   it is not any more
    victim    room is needed                      -> the next block to go

Blocks are only let go from the end of their chain: a block is of no use without those before it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence

from services.kvstore.policy.experts import Dropped, Expert, LruExpert, ReuseExpert
from services.kvstore.policy.reuse import ReuseModel, kind_of, session_kind
from services.kvstore.policy.runs import Run, RunTree

# Blocks remembered beyond those of the two simulated caches.
MIN_REMEMBERED_BLOCKS = 65_536
# How often the model learns: seldom once it knows the load.
MIN_LEARN_BLOCKS = 1024
MAX_LEARN_BLOCKS = 8192
# A model of 64-token blocks computes a block behind 2,048 others for about twice the cost of the first.
COST_SLOPE = 1 / 2048


class EvictionPolicy:
    """The policy of one tier and one block size. `is_present` tells whether the tier has a block."""

    def __init__(
        self,
        capacity_blocks: int,
        *,
        is_present: Callable[[bytes], bool],
        cost_slope: float = COST_SLOPE,
        scale: int = 1,
        min_remembered_blocks: int | None = None,
    ) -> None:
        """`scale`: each block stands for so many, of which the policy hears of one."""
        self.capacity_blocks = capacity_blocks
        self.tree = RunTree()
        self._is_present = is_present
        self._scale = scale
        self._min_remembered = min_remembered_blocks or MIN_REMEMBERED_BLOCKS
        self.model = ReuseModel(half_life=max(4 * capacity_blocks, 2 * self._min_remembered))
        self._lru = LruExpert(self.tree)
        self._reuse = ReuseExpert(self.tree, self.model, cost_slope=cost_slope)
        self.leader: Expert = self._lru
        self._condemned: OrderedDict[bytes, None] = OrderedDict()
        self._sweep: Iterator[bytes] = iter(())
        self._learn_at = MIN_LEARN_BLOCKS
        self._now_ms = 0.0
        self.rewanted_blocks = 0  # evicted, and then wanted
        self.rewanted_gap_ms = 0.0  # the sum of the times between
        self.duel = Duel(self)

    def knows(self, key: bytes) -> bool:
        """Whether the block was wanted or offered, as far as remembered."""
        return self.tree.get(key) is not None

    def want(self, chain: Sequence[bytes], *, now_ms: float = 0.0) -> None:
        """A request wanted the blocks of the chain, from its start on."""
        tree = self.tree
        self._now_ms = now_ms
        path = tree.walk(chain)
        self.duel.count(_leading(self._lru, path), _leading(self._reuse, path), _present(path))
        tree.now += len(chain)
        parent_frequency = 0
        for run in path:
            self._wanted(run, len(chain), parent_frequency, last=run is path[-1])
            parent_frequency = run.frequency
        for run in reversed(path):
            tree.recency.move_to_end(run)
        self._lru.touch(path)
        self._reuse.touch(path)
        for run in path:
            if run.present:
                self._admit(run, run.present)
            if run.present < len(run.keys):
                break
        self._trim()
        if tree.now >= self._learn_at:
            self._learn()

    def offer(self, keys: Sequence[bytes]) -> list[bytes]:
        """Blocks that could be stored, each after the one before it in its chain; those worth it."""
        places: list[tuple[bytes, Run, int]] = []
        for key in keys:
            run = self._known(key)
            at = _place(run, key, run.lru)
            self._admit(run, at + 1)
            places.append((key, run, at))
        self._trim()
        return [key for key, run, at in places if at < self.leader.count(run)]

    def publish(self, key: bytes) -> None:
        """The block is in the tier now."""
        run = self._known(key)
        at = _place(run, key, run.present)
        if at >= self.leader.count(run):
            self._admit(run, at + 1)
            self._trim()
        if at == run.present:
            run.present += 1
            while run.present < len(run.keys) and self._is_present(run.keys[run.present]):
                run.present += 1
        if at >= self.leader.count(run):
            self.condemn(key)

    def discard(self, key: bytes) -> None:
        """The block is not in the tier any more. The simulated caches go on without noticing."""
        self._condemned.pop(key, None)
        run = self.tree.get(key)
        if run is None:
            return
        at = _place(run, key, run.present - 1)
        run.present = min(run.present, at)

    def evicted(self, key: bytes) -> None:
        """The block is not in the tier any more because the policy named it."""
        self.discard(key)
        run = self.tree.get(key)
        if run is not None:
            run.evicted = min(run.evicted + 1, len(run.keys))
            run.evicted_ms = self._now_ms

    def expected_reuse(self, key: bytes) -> float:
        """How likely the block is wanted again, 0 to 1, as far as is known."""
        run = self.tree.get(key)
        return 0.0 if run is None else float(self.model.reuse[self.tree.columns.kind[run.index]])

    def kind(self, key: bytes) -> int:
        """The kind of a block that is known."""
        run = self.tree.get(key)
        if run is None:
            raise KeyError(key.hex())
        return self.tree.columns.kind[run.index]

    def place(self, key: bytes) -> tuple[bytes | None, int, int] | None:
        """The block before this one in its chain, how many are before it, and its kind; None if unknown."""
        run = self.tree.get(key)
        if run is None:
            return None
        at = _place(run, key, run.present - 1)
        parent = run.keys[at - 1] if at else run.parent.keys[-1] if run.parent is not None else None
        return parent, run.depth + at, self.tree.columns.kind[run.index]

    @property
    def by_reuse(self) -> bool:
        """Whether learned reuse leads."""
        return self.leader is self._reuse

    def victim(self) -> bytes | None:
        """A block to evict next; None when there is none left. It is not named again until `condemn`."""
        if self._condemned:
            return self._condemned.popitem(last=False)[0]
        key = next(self._sweep, None)
        if key is not None:
            return key
        while dropped := self.leader.shrink(1):
            run, at, _ = dropped[0]
            if self._is_present(run.keys[at]):
                return run.keys[at]
        self._sweep = self._strangers(list(self.tree.oldest()))  # all that is left was held, or is now
        return next(self._sweep, None)

    def spared(self, key: bytes) -> None:
        """The block that was named is still there: it was held, and is not any more."""
        run = self.tree.get(key)
        if run is not None and self.leader.total < self.capacity_blocks:
            self._admit(run, _place(run, key, self.leader.count(run)) + 1)
            self._trim()
        if run is None or _place(run, key, run.present - 1) >= self.leader.count(run):
            self.condemn(key)

    def resize(self, capacity_blocks: int) -> None:
        """The tier has room for so many blocks from now on."""
        self.capacity_blocks = capacity_blocks
        self._trim()

    def check(self) -> None:
        """AssertionError unless the simulated caches count right and chains are held from their start."""
        runs = list(self.tree.oldest())
        assert self._lru.total == sum(run.lru for run in runs) <= max(self.capacity_blocks, 0)
        assert self._reuse.total == sum(run.kept for run in runs) <= max(self.capacity_blocks, 0)
        kept_children = Counter(run.parent for run in runs if run.kept)
        for run in runs:
            assert 0 <= run.lru <= len(run.keys) and 0 <= run.kept <= len(run.keys)
            assert run.kept_children == kept_children[run]

    def condemn(self, key: bytes) -> None:
        """The block goes before all that is worth keeping."""
        self._condemned[key] = None

    def lead(self, *, by_reuse: bool) -> None:
        """Follow the other simulated cache from now on."""
        self.leader = self._reuse if by_reuse else self._lru
        self._condemned.clear()
        self._sweep = self._strangers(list(self.tree.oldest()))

    def _strangers(self, runs: Sequence[Run]) -> Iterator[bytes]:
        """Blocks that are there and that the leader would not have."""
        for run in runs:
            if run.gone:
                continue
            for at in range(len(run.keys) - 1, -1, -1):
                if at >= len(run.keys):
                    continue
                if at < self.leader.count(run):
                    break
                if self._is_present(run.keys[at]):
                    yield run.keys[at]

    def _wanted(self, run: Run, chain_blocks: int, parent_frequency: int, *, last: bool) -> None:
        tree, columns = self.tree, self.tree.columns
        if run.evicted:
            self.rewanted_blocks += run.evicted
            self.rewanted_gap_ms += run.evicted * (self._now_ms - run.evicted_ms)
            run.evicted = 0
        if run.frequency:
            run.gap = tree.now - run.last
            self.model.record(columns.kind[run.index], run.gap, len(run.keys), wanted=True)
        else:
            run.session = session_kind(parent_frequency)
        run.frequency += 1
        run.last = tree.now
        columns.last[run.index] = run.last
        columns.kind[run.index] = kind_of(
            run.frequency, run.gap * self._scale, run.session, chain_blocks * self._scale, last
        )

    def _known(self, key: bytes) -> Run:
        """The block's run; a block that nobody wanted yet, as generated ones, begins one."""
        run = self.tree.get(key)
        if run is None:
            run = self.tree.walk([key])[0]
            self._wanted(run, 1, 0, last=False)
        return run

    def _admit(self, run: Run, n_blocks: int) -> None:
        if self._condemned:
            for key in run.keys[self.leader.count(run) : n_blocks]:
                self._condemned.pop(key, None)
        self._lru.grow(run, n_blocks)
        self._reuse.grow(run, n_blocks)
        # Those before it are in the tier, or were offered too: no block is held without them.
        above = run.parent
        while above is not None and min(above.lru, above.kept) < len(above.keys):
            self._lru.grow(above, len(above.keys))
            self._reuse.grow(above, len(above.keys))
            above = above.parent

    def _trim(self) -> None:
        for expert in (self._lru, self._reuse):
            over = expert.total - self.capacity_blocks
            if over > 0:
                dropped = expert.shrink(over)
                if expert is self.leader:
                    self._condemn_all(dropped)

    def _condemn_all(self, dropped: Sequence[Dropped]) -> None:
        for run, first, end in dropped:
            for key in reversed(run.keys[first:end]):
                if self._is_present(key):
                    self._condemned[key] = None

    def _learn(self) -> None:
        tree = self.tree
        self._forget_old()
        self.model.learn(tree.columns, tree.now)
        self._reuse.rank()
        until = max(min(tree.now // 8, MAX_LEARN_BLOCKS), MIN_LEARN_BLOCKS, self.capacity_blocks // 32)
        self._learn_at = tree.now + until

    def _forget_old(self) -> None:
        """Forget what was not wanted for longest, beyond what is remembered."""
        over = len(self.tree) - 2 * self.capacity_blocks - self._min_remembered
        if over <= 0:
            return
        old: list[Run] = []
        for run in self.tree.oldest():
            if over <= 0:
                break
            if not (run.lru or run.kept or run.present) and not any(map(self._is_present, run.keys)):
                old.append(run)
                over -= len(run.keys)
        for run in old:
            if not run.children:
                age = self.tree.now - run.last
                self.model.record(self.tree.columns.kind[run.index], age, len(run.keys), wanted=False)
                self.tree.forget(run)


class Duel:
    """Counts the hits of both simulated caches and decides whom to follow. What was gained over LRU is the
    stake: with little of it a small loss ends the following, with much of it a bad stretch is sat out."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._by_reuse = False
        self._ahead = 0  # of the one not followed, since it was last behind
        self._bank = 0  # hits that the tier had beyond those of LRU
        self._bank_before = 0
        self._dearer = 1.0
        self.lru_hits = 0
        self.reuse_hits = 0
        self.changes = 0

    def count(self, lru_hits: int, reuse_hits: int, tier_hits: int) -> None:
        """Blocks of one chain that each would have had, and that the tier had."""
        self.lru_hits += lru_hits
        self.reuse_hits += reuse_hits
        self._bank += tier_hits - lru_hits
        ahead = reuse_hits - lru_hits
        self._ahead = max(0, self._ahead + (-ahead if self._by_reuse else ahead))
        if self._ahead > self.stake():
            self._change()

    def stake(self) -> float:
        """Hits that the other one must gain before it is followed."""
        capacity = self._policy.capacity_blocks
        if self._by_reuse:
            free = min(capacity / 64, 256.0) if self._bank >= 0 else 0.0
            return max(24.0, free, self._policy.tree.now / 1000, min(capacity / 4, self._bank / 4))
        return max(64.0, capacity / 64) * self._dearer

    def _change(self) -> None:
        if self._by_reuse:  # it lost in the end: did it pay?
            paid = self._bank > self._bank_before
            self._dearer = max(self._dearer / 2, 1.0) if paid else min(self._dearer * 2, 64.0)
        self._bank_before = self._bank
        self._by_reuse = not self._by_reuse
        self._ahead = 0
        self.changes += 1
        self._policy.lead(by_reuse=self._by_reuse)


def _leading(expert: Expert, path: Sequence[Run]) -> int:
    hits = 0
    for run in path:
        held = expert.count(run)
        hits += held
        if held < len(run.keys):
            break
    return hits


def _present(path: Sequence[Run]) -> int:
    hits = 0
    for run in path:
        hits += run.present
        if run.present < len(run.keys):
            break
    return hits


def _place(run: Run, key: bytes, guess: int) -> int:
    """Where in its run the block is."""
    if 0 <= guess < len(run.keys) and run.keys[guess] == key:
        return guess
    return run.keys.index(key)
