"""The index against a plain model of who holds what; bounds; events in order, with gaps, from scratch."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from libs.common.block_hash import pack_hashes
from libs.common.kv_event_view import EventMissed
from services.router.prefix_index import PrefixIndex
from slipstream.v1 import common_pb2, kv_events_pb2

WORKER = common_pb2.CACHE_TIER_WORKER
DRAM, NVME = common_pb2.CACHE_TIER_DRAM, common_pb2.CACHE_TIER_NVME
MAX_PREDICTED, MAX_TENANT = 20, 12


def chain(name: int, n: int) -> list[bytes]:
    """Hashes of a prompt; all prompts share their first two blocks."""
    return [bytes([0 if i < 2 else name, i]) + bytes(14) for i in range(n)]


def stored(sequence: int, hashes: list[bytes], *, gone: bool = False) -> kv_events_pb2.WatchBlocksResponse:
    changed = kv_events_pb2.BlocksChanged(block_hashes=pack_hashes(hashes), tier=WORKER)
    response = kv_events_pb2.WatchBlocksResponse(incarnation="i", sequence=sequence)
    (response.removed if gone else response.stored).CopyFrom(changed)
    return response


def snapshot(sequence: int, hashes: list[bytes]) -> kv_events_pb2.WatchBlocksResponse:
    held = [kv_events_pb2.BlocksChanged(block_hashes=pack_hashes(hashes), tier=WORKER)]
    return kv_events_pb2.WatchBlocksResponse(
        incarnation="i",
        sequence=sequence,
        snapshot=kv_events_pb2.BlocksSnapshot(held=held, last=True),
    )


class Index(RuleBasedStateMachine):
    """Workers store and drop whole prefixes, as their caches do; routers predict; time passes."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(max_predicted=MAX_PREDICTED, max_tenant_predicted=MAX_TENANT)
        self.prompts: dict[str, dict[int, int]] = {}  # holder -> prompt -> blocks held
        self.predicted: list[tuple[str, int, int, float]] = []  # holder, prompt, blocks, until
        self.now_s = 0.0

    @rule(holder=st.sampled_from("abc"), name=st.integers(1, 3), n=st.integers(0, 8))
    def hold(self, holder: str, name: int, n: int) -> None:
        self.prompts.setdefault(holder, {})[name] = n
        self.index.view(holder).held[WORKER] = {
            block for prompt, blocks in self.prompts[holder].items() for block in chain(prompt, blocks)
        }

    @rule(holder=st.sampled_from("abc"))
    def drop(self, holder: str) -> None:
        self.prompts.pop(holder, None)
        self.predicted = [entry for entry in self.predicted if entry[0] != holder]
        self.index.drop(holder)

    @rule(
        holder=st.sampled_from("abc"),
        name=st.integers(1, 3),
        n=st.integers(1, 8),
        ttl_s=st.sampled_from([1.0, 5.0]),
        tenant=st.sampled_from(["t", "u"]),
    )
    def predict(self, holder: str, name: int, n: int, ttl_s: float, tenant: str) -> None:
        self.index.predict(holder, chain(name, n), tenant=tenant, now_s=self.now_s, ttl_s=ttl_s)
        self.predicted.append((holder, name, n, self.now_s + ttl_s))

    @rule(seconds=st.sampled_from([0.5, 3.0, 10.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @invariant()
    def lookups_are_right(self) -> None:
        for holder in "abc":
            confirmed = self.prompts.get(holder, {})
            hoped = [
                (prompt, n)
                for who, prompt, n, until_s in self.predicted
                if who == holder and until_s > self.now_s
            ]
            for name in (1, 2, 3):
                asked = chain(name, 8)
                found = self.index.prefix_blocks(holder, asked, now_s=self.now_s)
                sure = _longest(asked, {b for p, n in confirmed.items() for b in chain(p, n)})
                most = _longest(asked, {b for p, n in [*confirmed.items(), *hoped] for b in chain(p, n)})
                assert self.index.prefix_blocks(holder, asked, now_s=self.now_s, tier=WORKER) == sure
                # Predictions may have been forgotten for room, never invented.
                assert sure <= found <= most

    @invariant()
    def memory_is_bounded(self) -> None:
        assert self.index.predicted_blocks <= MAX_PREDICTED
        assert self.index.tenant_blocks("t") <= MAX_TENANT
        assert self.index.blocks == sum(
            len({b for p, n in prompts.items() for b in chain(p, n)}) for prompts in self.prompts.values()
        )


def _longest(hashes: list[bytes], held: set[bytes]) -> int:
    n = 0
    while n < len(hashes) and hashes[n] in held:
        n += 1
    return n


TestIndex = Index.TestCase
TestIndex.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_a_prediction_is_found_at_once_and_forgotten_in_time() -> None:
    index = PrefixIndex()
    index.predict("a", chain(1, 6), tenant="t", now_s=0.0, ttl_s=5.0)
    assert index.prefix_blocks("a", chain(1, 9), now_s=4.9) == 6
    assert index.prefix_blocks("a", chain(1, 9), now_s=5.0) == 0
    index.predict("a", chain(2, 4), tenant="t", now_s=6.0, ttl_s=5.0)
    assert index.predicted_blocks == 4


def test_what_a_holder_has_is_not_predicted_again() -> None:
    index = PrefixIndex()
    index.view("a").held[WORKER] = set(chain(1, 5))
    index.predict("a", chain(1, 6), tenant="t", now_s=0.0, ttl_s=5.0)
    assert (index.predicted_blocks, index.prefix_blocks("a", chain(1, 6), now_s=1.0)) == (1, 6)


def test_events_apply_in_order_and_a_gap_is_healed_by_a_snapshot() -> None:
    index = PrefixIndex()
    view = index.view("a")
    assert not index.knows("a")
    view.apply(snapshot(3, chain(1, 2)))
    view.apply(stored(4, chain(1, 6)))
    view.apply(stored(5, chain(1, 6)[4:], gone=True))
    assert index.knows("a")
    assert index.prefix_blocks("a", chain(1, 8), now_s=0.0) == 4
    with pytest.raises(EventMissed):
        view.apply(stored(7, chain(1, 8)))
    request = view.resume()
    assert (request.incarnation, request.after_sequence) == ("i", 5)
    view.apply(snapshot(9, chain(1, 1)))
    assert index.prefix_blocks("a", chain(1, 8), now_s=0.0) == 1


def test_the_bound_trims_the_largest_holder() -> None:
    index = PrefixIndex(max_blocks=100)
    index.view("big").held[WORKER] = {i.to_bytes(16, "little") for i in range(150)}
    index.view("small").held[WORKER] = set(chain(1, 8))
    assert index.trim() == 58
    assert index.blocks == 100
    assert index.prefix_blocks("small", chain(1, 8), now_s=0.0) == 8
    assert index.trim() == 0


def test_tiers_of_a_store_are_told_apart() -> None:
    index = PrefixIndex()
    held = index.view("k").held
    held[DRAM], held[NVME] = set(chain(1, 3)), set(chain(1, 7))
    assert index.prefix_blocks("k", chain(1, 9), now_s=0.0) == 7
    assert index.prefix_blocks("k", chain(1, 9), now_s=0.0, tier=DRAM) == 3


def test_a_long_prompt_is_looked_up_with_few_probes() -> None:
    class Counting(set[bytes]):
        probes = 0

        def __contains__(self, key: object) -> bool:
            self.probes += 1
            return super().__contains__(key)

    index = PrefixIndex()
    hashes = [i.to_bytes(16, "little") for i in range(2_000)]
    held = Counting(hashes[:1_234])
    index.view("a").held[WORKER] = held
    assert index.prefix_blocks("a", hashes, now_s=0.0) == 1_234
    assert held.probes <= 14
