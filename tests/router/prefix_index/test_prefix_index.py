"""The prefix index against a naive model of holders and blocks; its bounds; events, gaps, snapshots."""

from __future__ import annotations

from hashlib import blake2b

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.router.prefix_index.index import PrefixIndex
from slipstream.block_hashes import pack_hashes
from slipstream.block_view import EventMissed
from slipstream.v1 import common_pb2, kv_events_pb2

WORKER = common_pb2.CACHE_TIER_WORKER
DRAM, NVME = common_pb2.CACHE_TIER_DRAM, common_pb2.CACHE_TIER_NVME
HOLDERS = "abc"
TIERS = (DRAM, NVME)
# Each letter is a block: prompts share prefixes of any length, extend others, or are unrelated.
PROMPTS = ("pqrstuvw", "pqrstxyz", "pqabc", "pqrstu", "k", "lmnop", "lmnopqrstuvwxyz")
A_LOT = 10**9


def chain(prompt: str, n: int | None = None, *, tenant: str = "t") -> list[bytes]:
    """Hashes of a prompt's first blocks. Each depends on all blocks before it and on the tenant."""
    last, hashes = tenant.encode(), []
    for letter in prompt[:n]:
        last = blake2b(last + letter.encode(), digest_size=16).digest()
        hashes.append(last)
    return hashes


def stored(sequence: int, hashes: list[bytes], *, gone: bool = False) -> kv_events_pb2.WatchBlocksResponse:
    changed = kv_events_pb2.BlocksChanged(block_hashes=pack_hashes(hashes), tier=WORKER)
    response = kv_events_pb2.WatchBlocksResponse(incarnation="i", sequence=sequence)
    (response.removed if gone else response.stored).CopyFrom(changed)
    return response


def snapshot(
    sequence: int, hashes: list[bytes], *, last: bool = True, tier: int = WORKER
) -> kv_events_pb2.WatchBlocksResponse:
    held = [
        kv_events_pb2.BlocksChanged(
            block_hashes=pack_hashes(hashes), tier=common_pb2.CacheTier.ValueType(tier)
        )
    ]
    return kv_events_pb2.WatchBlocksResponse(
        incarnation="i",
        sequence=sequence,
        snapshot=kv_events_pb2.BlocksSnapshot(held=held, last=last),
    )


some_blocks = st.lists(
    st.tuples(st.sampled_from(PROMPTS), st.integers(0, 14), st.sampled_from("tu")), min_size=1, max_size=8
).map(lambda picks: [chain(p, tenant=t)[min(i, len(p) - 1)] for p, i, t in picks])
pieces = st.tuples(
    st.sampled_from(PROMPTS), st.integers(0, 14), st.integers(1, 15), st.booleans(), st.sampled_from("tu")
).map(lambda p: chain(p[0], tenant=p[4])[p[1] : p[2]][:: -1 if p[3] else 1])


class Model:
    """Sets of hashes, and all predictions."""

    def __init__(self) -> None:
        self.held: dict[tuple[str, int], set[bytes]] = {}
        self.predictions: list[tuple[str, list[bytes], float]] = []

    def prefix(self, holder: str, hashes: list[bytes], now_s: float, tier: int | None) -> int:
        known: set[bytes] = set()
        for (name, of), held in self.held.items():
            if name == holder and tier in (None, of):
                known |= held
        if tier is None:
            for name, sent, until_s in self.predictions:
                if name == holder and until_s > now_s:
                    known |= set(sent)
        n = 0
        while n < len(hashes) and hashes[n] in known:
            n += 1
        return n


class Index(RuleBasedStateMachine):
    """Holders report any blocks in any order; the router predicts; time passes."""

    max_bytes, max_tenant_bytes = A_LOT, A_LOT

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(max_bytes=self.max_bytes, max_tenant_bytes=self.max_tenant_bytes)
        self.model = Model()
        self.now_s = 0.0

    def is_correct(self, found: int, true: int, most: int) -> bool:
        return found == true

    @rule(holder=st.sampled_from(HOLDERS), tier=st.sampled_from(TIERS), hashes=st.one_of(some_blocks, pieces))
    def store(self, holder: str, tier: int, hashes: list[bytes]) -> None:
        self.index.view(holder).stored(tier, hashes)
        self.model.held.setdefault((holder, tier), set()).update(hashes)

    @rule(holder=st.sampled_from(HOLDERS), tier=st.sampled_from(TIERS), hashes=st.one_of(some_blocks, pieces))
    def remove(self, holder: str, tier: int, hashes: list[bytes]) -> None:
        self.index.view(holder).removed(tier, hashes)
        self.model.held.get((holder, tier), set()).difference_update(hashes)

    @rule(holder=st.sampled_from(HOLDERS), hashes=some_blocks)
    def replace(self, holder: str, hashes: list[bytes]) -> None:
        """A snapshot in two pieces, of two tiers."""
        view = self.index.view(holder)
        view.apply(snapshot(view.sequence + 3, hashes, last=False, tier=DRAM))
        self.lookups_equal_the_model()
        view.apply(snapshot(view.sequence + 3, hashes[::2], tier=NVME))
        self.model.held[holder, DRAM], self.model.held[holder, NVME] = set(hashes), set(hashes[::2])

    @rule(holder=st.sampled_from(HOLDERS))
    def drop(self, holder: str) -> None:
        self.index.drop(holder)
        self.model.predictions = [entry for entry in self.model.predictions if entry[0] != holder]
        for tier in TIERS:
            self.model.held.pop((holder, tier), None)

    @rule(
        holder=st.sampled_from(HOLDERS),
        prompt=st.sampled_from(PROMPTS),
        n=st.integers(1, 15),
        ttl_s=st.sampled_from([1.0, 5.0, 20.0]),
        tenant=st.sampled_from("tu"),
    )
    def predict(self, holder: str, prompt: str, n: int, ttl_s: float, tenant: str) -> None:
        """Like placement: one lookup, then two predictions."""
        hashes = chain(prompt, n, tenant=tenant)
        self.index.find(hashes, tenant=tenant, now_s=self.now_s)
        for name in (holder, "c"):
            self.index.predict(name, hashes, tenant=tenant, now_s=self.now_s, ttl_s=ttl_s)
            self.model.predictions.append((name, hashes, self.now_s + ttl_s))

    @rule(seconds=st.sampled_from([0.5, 3.0, 10.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(max_blocks=st.sampled_from([1, 3, 100]))
    def clean_up(self, max_blocks: int) -> None:
        self.index.clean_up(self.now_s, max_blocks=max_blocks)

    @invariant()
    def lookups_equal_the_model(self) -> None:
        for tenant in "tu":
            for prompt in PROMPTS:
                asked = chain(prompt, tenant=tenant)
                found = self.index.find(asked, tenant=tenant, now_s=self.now_s)
                for holder in HOLDERS:
                    for tier in (None, *TIERS):
                        true = self.model.prefix(holder, asked, self.now_s, tier)
                        assert self.is_correct(found.blocks(holder, tier=tier), true, len(asked))

    @invariant()
    def index_is_consistent(self) -> None:
        self.index.check()
        assert self.index.n_bytes <= self.max_bytes
        for tenant in ("t", "u", None):
            assert self.index.tenant_bytes(tenant) <= self.max_tenant_bytes

    def teardown(self) -> None:
        for holder in HOLDERS:
            self.index.drop(holder)
        self.index.clean_up(self.now_s + 1e6, max_blocks=A_LOT)
        assert (self.index.blocks, self.index.nodes, self.index.n_bytes) == (0, 0, 0)


class FullIndex(Index):
    """The same with small bounds: blocks are evicted, and no block is invented."""

    max_bytes, max_tenant_bytes = 9_000, 5_000

    def is_correct(self, found: int, true: int, most: int) -> bool:
        return found <= true

    @precondition(lambda self: self.index.evicted_blocks)
    @rule()
    def the_index_evicted(self) -> None:
        assert self.index.n_bytes <= self.max_bytes


TestIndex = Index.TestCase
TestIndex.settings = settings(stateful_step_count=25, deadline=None)
TestFullIndex = FullIndex.TestCase
TestFullIndex.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def long_chain(name: str, n: int) -> list[bytes]:
    """Hashes of a prompt that shares no block with others."""
    return [blake2b(f"{name}{i}".encode(), digest_size=16).digest() for i in range(n)]


def test_a_prediction_is_found_at_once_and_expires() -> None:
    index, prompt = PrefixIndex(), long_chain("a", 9)
    index.predict("a", prompt[:6], tenant="t", now_s=0.0, ttl_s=5.0)
    assert index.prefix_blocks("a", prompt, now_s=4.9) == 6
    assert index.prefix_blocks("a", prompt, now_s=5.0) == 0
    index.predict("a", long_chain("b", 4), tenant="t", now_s=6.0, ttl_s=5.0)
    assert index.blocks == 4


def test_a_turn_extends_earlier_predictions() -> None:
    index, prompt = PrefixIndex(), long_chain("a", 9)
    index.predict("a", prompt[:6], tenant="t", now_s=0.0, ttl_s=5.0)
    index.predict("a", prompt[:8], tenant="t", now_s=4.0, ttl_s=5.0)
    assert index.prefix_blocks("a", prompt, now_s=8.9) == 8


def test_events_apply_in_order_and_a_snapshot_repairs_a_gap() -> None:
    index, prompt = PrefixIndex(), long_chain("a", 8)
    view = index.view("a")
    assert not index.knows("a")
    view.apply(snapshot(3, prompt[:2]))
    view.apply(stored(4, prompt[:6]))
    view.apply(stored(5, prompt[4:6], gone=True))
    assert index.knows("a")
    assert index.prefix_blocks("a", prompt, now_s=0.0) == 4
    with pytest.raises(EventMissed):
        view.apply(stored(7, prompt))
    request = view.resume()
    assert (request.incarnation, request.after_sequence) == ("i", 5)
    view.apply(snapshot(9, prompt[:1]))
    assert index.prefix_blocks("a", prompt, now_s=0.0) == 1
    assert view.blocks == 1


def test_an_incomplete_snapshot_is_dropped_by_the_next_call() -> None:
    index, prompt = PrefixIndex(), long_chain("a", 8)
    view = index.view("a")
    view.apply(snapshot(3, prompt[:2]))
    view.apply(snapshot(9, prompt, last=False))
    assert index.prefix_blocks("a", prompt, now_s=0.0) == 2
    view.resume()
    view.apply(stored(4, prompt[2:3]))
    assert (index.prefix_blocks("a", prompt, now_s=0.0), view.blocks) == (3, 3)


def test_tiers_of_a_store_are_separate() -> None:
    index, prompt = PrefixIndex(), long_chain("a", 9)
    index.view("k").stored(DRAM, prompt[:3])
    index.view("k").stored(NVME, prompt[:7])
    assert index.prefix_blocks("k", prompt, now_s=0.0) == 7
    assert index.prefix_blocks("k", prompt, now_s=0.0, tier=DRAM) == 3


def test_a_conversation_is_one_node_except_while_another_branches_off() -> None:
    index, prompt = PrefixIndex(), long_chain("a", 40)
    for turn in range(1, 11):
        index.predict("a", prompt[: 4 * turn], tenant="t", now_s=0.0, ttl_s=50.0)
    assert (index.nodes, index.blocks) == (1, 40)
    index.predict("b", prompt[:13] + long_chain("b", 2), tenant="t", now_s=0.0, ttl_s=5.0)
    assert (index.nodes, index.blocks) == (3, 42)
    assert index.prefix_blocks("b", prompt, now_s=0.0) == 13
    index.clean_up(6.0)
    assert (index.nodes, index.blocks) == (1, 40)
    assert index.prefix_blocks("a", prompt, now_s=6.0) == 40
    assert index.prefix_blocks("b", prompt, now_s=6.0) == 0
    index.check()


def test_splits_and_merges_leave_no_stale_queue_entries() -> None:
    index = PrefixIndex()
    for n in range(600):
        talk = long_chain("a", 50) if not n else [*long_chain("a", n % 49), *long_chain(f"{n}", 1)]
        index.predict("a", talk, tenant="t", now_s=float(n), ttl_s=0.5 if n else 1e6)
    index.check()


def test_a_list_of_hashes_is_looked_up_again_after_it_grew() -> None:
    index, prompt = PrefixIndex(), long_chain("a", 40)
    index.predict("b", prompt, tenant="t", now_s=0.0, ttl_s=50.0)
    index.predict("b", [*prompt[:30], *long_chain("b", 3)], tenant="t", now_s=0.0, ttl_s=50.0)
    growing = prompt[:10]
    index.predict("a", growing, tenant="t", now_s=0.0, ttl_s=50.0)
    growing += prompt[10:]
    index.predict("a", growing, tenant="t", now_s=0.0, ttl_s=50.0)
    assert index.blocks == 43
    assert index.prefix_blocks("a", prompt, now_s=0.0) == 40
    index.check()


def test_several_holders_share_the_memory_of_a_block() -> None:
    index, prompt = PrefixIndex(), long_chain("a", 4000)
    index.predict("a", prompt, tenant="t", now_s=0.0, ttl_s=50.0)
    alone = index.n_bytes
    for name in "abcd":
        for tier in (DRAM, NVME):
            index.view(name).stored(tier, prompt)
    assert index.blocks == 4000
    assert index.n_bytes < 1.1 * alone < 1.1 * 35 * 4000


def test_ends_of_unused_conversations_are_evicted_and_used_ones_stay_whole() -> None:
    index = PrefixIndex(max_tenant_bytes=400_000)
    talks = [long_chain(f"talk{i}", 1000) for i in range(20)]
    for talk in talks:
        index.predict("a", talks[0], tenant="t", now_s=0.0, ttl_s=50.0)
        index.predict("a", talk, tenant="t", now_s=0.0, ttl_s=50.0)
    index.check()
    found = [index.prefix_blocks("a", talk, now_s=1.0) for talk in talks]
    assert index.tenant_bytes("t") <= 400_000
    assert found[0] == found[19] == found[15] == 1000
    assert found[1] == found[5] == 0
    assert sorted(found[1:]) == found[1:]  # an older one keeps no more blocks than a newer one


def test_a_tenant_with_many_conversations_evicts_none_of_others() -> None:
    index = PrefixIndex(max_bytes=300_000, max_tenant_bytes=300_000)
    mine = long_chain("mine", 1000)
    index.predict("a", mine, tenant="few", now_s=0.0, ttl_s=50.0)
    for i in range(50):
        index.predict("a", long_chain(f"{i}", 500), tenant="many", now_s=0.0, ttl_s=50.0)
    index.view("a").stored(WORKER, [h for i in range(50) for h in long_chain(f"in no prompt {i}", 500)])
    assert index.prefix_blocks("a", mine, now_s=1.0, tenant="few") == 1000
    assert index.n_bytes <= 300_000


def test_reports_on_a_tenants_blocks_keep_its_bound() -> None:
    index = PrefixIndex(max_tenant_bytes=40_000)
    talks = [long_chain(f"{i}", 50) for i in range(20)]
    for talk in talks:
        index.predict("a", talk, tenant="t", now_s=0.0, ttl_s=50.0)
    for name in "abcdefgh":
        index.view(name).stored(WORKER, [h for talk in talks for h in talk])
        assert index.tenant_bytes("t") <= 40_000
    index.check()


def test_blocks_that_no_prompt_contained_are_found_once_one_does() -> None:
    """A new router has only an unordered snapshot."""
    index = PrefixIndex()
    talks = [long_chain(f"talk{i}", 700) for i in range(5)]
    index.view("a").stored(WORKER, sorted(h for talk in talks for h in talk))
    assert index.tenant_bytes(None) == index.n_bytes
    for talk in talks:
        assert index.prefix_blocks("a", [*talk, *long_chain("more", 3)], now_s=0.0, tenant="t") == 700
    index.check()
    assert (index.nodes, index.blocks, index.tenant_bytes(None)) == (5, 3500, 0)
    index.view("a").removed(WORKER, [h for talk in talks for h in talk])
    assert (index.nodes, index.blocks, index.n_bytes) == (0, 0, 0)


def test_a_dropped_holder_is_removed_in_small_steps() -> None:
    index = PrefixIndex()
    prompt = long_chain("a", 3000)
    index.predict("a", prompt, tenant="t", now_s=0.0, ttl_s=50.0)
    index.drop("a")
    assert index.prefix_blocks("a", prompt, now_s=0.0) == 0
    index.clean_up(0.0, max_blocks=100)
    assert 2900 <= index.blocks < 2950
    index.check()
    index.clean_up(0.0, max_blocks=4000)
    assert (index.blocks, index.n_bytes) == (0, 0)


def test_many_nodes_and_their_parents_are_removed_in_small_steps() -> None:
    index, talk = PrefixIndex(), long_chain("talk", 200)
    for n in (50, 100, 150, 200):  # nodes below each other
        index.predict("a", [*talk[:n], *long_chain(f"{n}", 20)], tenant="t", now_s=0.0, ttl_s=50.0)
    for n in range(10):
        index.predict("a", long_chain(f"alone {n}", 40), tenant="t", now_s=0.0, ttl_s=50.0)
    index.drop("a")
    before = index.blocks
    while before:
        index.clean_up(0.0, max_blocks=70)
        assert 0 < before - index.blocks <= 70
        before = index.blocks
    assert (index.nodes, index.n_bytes) == (0, 0)


def test_unclaimed_blocks_of_an_evicted_chain_are_removed() -> None:
    index, talk = PrefixIndex(max_tenant_bytes=40_000), long_chain("a", 1000)
    index.view("a").stored(WORKER, talk[900:])
    index.predict("b", talk, tenant="t", now_s=0.0, ttl_s=5.0)
    index.clean_up(6.0)
    index.predict("b", long_chain("b", 300), tenant="t", now_s=6.0, ttl_s=5.0)
    index.drop("a")
    index.clean_up(20.0)
    assert index.evicted_blocks and (index.blocks, index.nodes, index.n_bytes) == (0, 0, 0)


def test_colliding_hash_prefixes_only_cause_wrong_lookups() -> None:
    index, prompt = PrefixIndex(), long_chain("a", 30)
    twin = [bytes(h[:8]) + bytes(8) for h in prompt]
    other = [*long_chain("b", 7), *twin[3:9], twin[3], *twin[20:]]
    for talk in (prompt, other, prompt, [*prompt[:4], *other], other):
        index.predict("a", talk, tenant="t", now_s=0.0, ttl_s=5.0)
        index.view("b").stored(WORKER, talk)
        index.view("b").removed(WORKER, other[::-2])
        index.prefix_blocks("b", talk, now_s=0.0, tenant="t")
    index.drop("b")
    index.clean_up(6.0)
    assert (index.blocks, index.nodes, index.n_bytes) == (0, 0, 0)
