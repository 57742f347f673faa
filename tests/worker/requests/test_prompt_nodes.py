"""The nodes and the accounts of the prompt cache: exact bytes, exact evictions, and a table that fits."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.common import service_bounds
from libs.common.block_hash import as_tokens, chain_hashes, tenant_salt
from libs.worker.requests.prompt_cache import PromptCache, PromptNode

BLOCK = 4
BLOCK_BYTES = 4 * BLOCK  # of its ids
KEY_BYTES, NODE_BYTES = 160, 500  # beside the ids: of a block, of a node
ROOT = bytes(16)
SALTS = [tenant_salt(name) for name in ("a", "b")]


def hashes_of(tokens: Sequence[int], salt: bytes = SALTS[0]) -> list[bytes]:
    return chain_hashes(list(tokens), root=ROOT, salt=salt, block_tokens=BLOCK)


def cache_of(**options: Any) -> PromptCache:
    return PromptCache(**{"block_tokens": BLOCK, "min_tokens": BLOCK, **options})


def insert(cache: PromptCache, tokens: Sequence[int], salt: bytes = SALTS[0]) -> list[bytes]:
    hashes = hashes_of(tokens, salt)
    cache.insert(salt, as_tokens(list(tokens)), hashes)
    return hashes


def n_found(cache: PromptCache, tokens: Sequence[int], salt: bytes = SALTS[0]) -> int:
    """How many leading blocks are cached, by the table, which no call changes."""
    table, hashes = cache._tree.tables.get(salt, {}), hashes_of(tokens, salt)
    known = [block_hash in table for block_hash in hashes]
    assert known == sorted(known, reverse=True), "a block without one before it"
    return sum(known)


def cost(*blocks: int) -> int:
    """The bytes of nodes with so many blocks."""
    return sum(NODE_BYTES + n * (KEY_BYTES + BLOCK_BYTES) for n in blocks)


def tokens_of(number: int, blocks: int) -> list[int]:
    """A prompt that shares no block with others."""
    return [1000 * number + n for n in range(BLOCK * blocks)]


def check(cache: PromptCache) -> None:
    """Compare the accounts and the tables with the nodes."""
    total = 0
    for salt, table in cache._tree.tables.items():
        nodes = {id(node): node for node in table.values()}.values()
        assert set(nodes) == set(cache._lru.nodes(salt)) and table
        assert sum(len(node.keys) for node in nodes) == len(table)
        for node in nodes:
            assert all(table[key] is node for key in node.keys)
            above = 0 if node.parent is None else node.parent.first_block + len(node.parent.keys)
            assert node.first_block == above
            assert len(node.parts) and node.ids_bytes == sum(map(len, node.parts))
            assert node.ids_bytes == BLOCK_BYTES * len(node.keys) and node.block_bytes == BLOCK_BYTES
            assert node.size_bytes() == node.n_bytes == cost(len(node.keys))
            assert len(node.children) != 1, "a node that its only child should have joined"
        assert cache._lru.tenant_bytes(salt) == sum(node.n_bytes for node in nodes)
        total += cache._lru.tenant_bytes(salt)
    assert cache.n_bytes == total


# ---- nodes


def node_of(sizes: Sequence[int]) -> PromptNode:
    """A node of appends of so many blocks, whose ids count the blocks."""
    node, first = PromptNode("t"), 0
    for size in sizes:
        hashes = [bytes([first + n]) * 16 for n in range(size)]
        node.append(hashes, [b"".join(bytes([first + n]) * BLOCK_BYTES for n in range(size))])
        first += size
    return node


def ids_of(first: int, last: int) -> bytes:
    return b"".join(bytes([n]) * BLOCK_BYTES for n in range(first, last))


_sizes = st.lists(st.integers(1, 12), min_size=1, max_size=12)


@given(_sizes)
def test_parts_are_few_and_each_is_more_than_twice_the_next_one(sizes: list[int]) -> None:
    node, n = node_of(sizes), sum(sizes)
    assert b"".join(node.parts) == ids_of(0, n) and len(node.keys) == n
    lengths = [len(part) for part in node.parts]
    assert all(first > 2 * second for first, second in pairwise(lengths))
    assert node.ids_bytes == BLOCK_BYTES * n and node.size_bytes() == cost(n)


def test_parts_of_more_than_twice_the_next_one_stay() -> None:
    assert [len(part) // BLOCK_BYTES for part in node_of([5, 2, 1]).parts] == [8]
    assert [len(part) // BLOCK_BYTES for part in node_of([5, 2]).parts] == [5, 2]
    assert [len(part) // BLOCK_BYTES for part in node_of([4, 2]).parts] == [6]
    assert [len(part) // BLOCK_BYTES for part in node_of([8, 3, 1]).parts] == [8, 3, 1]


@given(_sizes, st.data())
def test_a_node_is_cut_between_blocks(sizes: list[int], data: st.DataObject) -> None:
    n = sum(sizes)
    at = data.draw(st.integers(1, n))
    node = node_of(sizes)
    assert b"".join(node.ids(at)) == ids_of(0, at)
    assert node.ids(n) is node.parts
    node.truncate(at)
    assert (b"".join(node.parts), len(node.keys)) == (ids_of(0, at), at)
    assert node.ids_bytes == BLOCK_BYTES * at and node.keys == node_of(sizes).keys[:at]
    if at == n:
        return
    tail, head = node_of(sizes), PromptNode("t")
    tail.first_block = 7
    tail.move_head(head, at)
    assert (head.first_block, tail.first_block) == (7, 7 + at)
    assert (b"".join(head.parts), b"".join(tail.parts)) == (ids_of(0, at), ids_of(at, n))
    assert (head.ids_bytes, tail.ids_bytes) == (BLOCK_BYTES * at, BLOCK_BYTES * (n - at))
    assert head.keys + tail.keys == node_of(sizes).keys and len(head.keys) == at
    head.absorb(tail)
    assert (head.keys, b"".join(head.parts)) == (node_of(sizes).keys, ids_of(0, n))


@given(st.integers(1, 40), st.integers(1, 10_000))
def test_an_eviction_frees_what_is_asked_with_the_fewest_blocks(n: int, excess_bytes: int) -> None:
    node, each = node_of([n]), KEY_BYTES + BLOCK_BYTES
    kept = node.keys_after_eviction(excess_bytes)
    assert 0 <= kept < n
    assert (n - kept) * each >= excess_bytes or kept == 0
    assert (n - kept - 1) * each < excess_bytes


# ---- the cache

_prompts = st.lists(st.integers(0, 1), min_size=1, max_size=40)


@given(
    st.lists(st.tuples(_prompts, st.sampled_from(SALTS), st.booleans()), max_size=20),
    st.sampled_from([3_000, 6_000, 1 << 20]),
)
def test_accounts_and_tables_fit_the_nodes(
    calls: list[tuple[list[int], bytes, bool]], max_bytes: int
) -> None:
    cache = cache_of(max_bytes=max_bytes, max_tenant_bytes=max_bytes * 3 // 4)
    hits = misses = 0
    for tokens, salt, is_insert in calls:
        if is_insert:
            insert(cache, tokens, salt)
        hashes = hashes_of(tokens, salt)
        n_known = n_found(cache, tokens, salt)
        for blocks in range(1, len(hashes) + 1):
            found = cache.find(salt, hashes[blocks - 1], blocks=blocks)
            assert (found is not None) == (blocks <= n_known)
            hits, misses = hits + (found is not None), misses + (found is None)
            if found is not None:
                assert list(found.hashes) == hashes[:blocks]
                ids = np.frombuffer(b"".join(found.ids), "<u4").tolist()
                assert ids == tokens[: blocks * BLOCK]
        check(cache)
        assert cache.n_bytes <= max_bytes
        assert all(cache.tenant_bytes(each) <= max_bytes * 3 // 4 for each in SALTS)
        assert max_bytes < 1 << 20 or not is_insert or n_known == len(hashes)
    assert (cache.hits, cache.misses) == (hits, misses)


def test_a_prompt_is_cached_from_the_least_length_on() -> None:
    cache = cache_of(min_tokens=10)
    insert(cache, range(9))
    cache.insert(SALTS[0], as_tokens(list(range(12))), [])
    assert (cache.n_bytes, cache._tree.tables) == (0, {})
    insert(cache, range(10))
    assert cache.n_bytes == cost(2)


@pytest.mark.parametrize("smaller", ["max_bytes", "max_tenant_bytes"])
def test_new_blocks_of_more_than_half_a_bound_are_not_cached(smaller: str) -> None:
    bounds = {"max_bytes": 1 << 20, "max_tenant_bytes": 1 << 20, smaller: 2 * cost(6)}
    cache = cache_of(**bounds)
    insert(cache, tokens_of(1, 7))
    assert cache.n_bytes == 0
    insert(cache, tokens_of(1, 6))
    assert cache.n_bytes == cost(6)
    insert(cache, tokens_of(1, 12))  # six of its blocks are new
    assert (cache.n_bytes, n_found(cache, tokens_of(1, 12))) == (cost(12), 12)
    insert(cache, tokens_of(1, 19))
    assert n_found(cache, tokens_of(1, 19)) == 12


def test_prompts_share_the_node_of_their_common_blocks() -> None:
    cache = cache_of()
    first, second = tokens_of(1, 5), tokens_of(1, 3) + tokens_of(2, 4)
    insert(cache, first)
    insert(cache, second)
    assert cache.n_bytes == cost(3, 2, 4)
    insert(cache, first[: 4 * BLOCK])  # no new block
    assert cache.n_bytes == cost(3, 2, 4)
    check(cache)
    insert(cache, first, SALTS[1])
    assert (cache.tenant_bytes(SALTS[1]), cache.n_bytes) == (cost(5), cost(3, 2, 4, 5))
    assert cache.tenant_bytes(b"nobody's") == 0
    check(cache)


def test_a_prompt_may_diverge_within_a_node_below_another_one() -> None:
    cache = cache_of()
    stem, branch = tokens_of(0, 3), tokens_of(1, 4)
    last = stem + branch[: 2 * BLOCK] + tokens_of(3, 3)
    for tokens in (stem + branch, stem + tokens_of(2, 4), last):
        insert(cache, tokens)
    assert cache.n_bytes == cost(3, 2, 2, 3, 4)
    check(cache)
    found = cache.find(SALTS[0], hashes_of(last)[-1], blocks=8)
    assert found is not None and np.frombuffer(b"".join(found.ids), "<u4").tolist() == last


@pytest.mark.parametrize("blocks", [0, 1, 3, 4, 5, 6, 7, 2**32 - 1])
def test_a_hash_with_another_number_of_blocks_is_a_miss(blocks: int) -> None:
    cache = cache_of()
    hashes = insert(cache, tokens_of(1, 5))
    assert cache.find(SALTS[0], hashes[1], blocks=blocks) is None
    assert (cache.hits, cache.misses) == (0, 1)


@pytest.mark.parametrize("touch", ["find", "insert"])
def test_the_end_of_the_least_recently_used_prompt_goes_first(touch: str) -> None:
    cache = cache_of(max_bytes=1 << 20, max_tenant_bytes=cost(8, 8, 8))
    prompts = [tokens_of(n, 8) for n in range(3)]
    for prompt in prompts:
        insert(cache, prompt)
    if touch == "find":
        assert cache.find(SALTS[0], hashes_of(prompts[0])[1], blocks=2) is not None
    else:
        insert(cache, prompts[0][: 2 * BLOCK])
    insert(cache, tokens_of(3, 1))
    # A node of one block takes the bytes of 3.84 others.
    assert [n_found(cache, prompt) for prompt in prompts] == [8, 4, 8]
    assert n_found(cache, tokens_of(3, 1)) == 1
    check(cache)


def test_a_branch_that_goes_leaves_one_node() -> None:
    cache = cache_of(max_bytes=1 << 20, max_tenant_bytes=cost(20, 4, 4))
    stem = tokens_of(0, 20)
    insert(cache, stem[: 10 * BLOCK])
    insert(cache, stem)
    for n in range(1, 3):
        insert(cache, stem + tokens_of(n, 4))
    kept = stem + tokens_of(2, 4)
    insert(cache, kept + tokens_of(3, 5))
    assert n_found(cache, stem + tokens_of(1, 4)) == 20
    assert n_found(cache, kept + tokens_of(3, 5)) == 29
    assert cache.n_bytes == cost(29)
    check(cache)


@pytest.mark.parametrize("idle_s", [599.0, 600.0])
def test_a_tenant_is_idle_after_ten_minutes(idle_s: float) -> None:
    now_s = 0.0
    cache = cache_of(max_bytes=cost(4, 4) + 7, max_tenant_bytes=1 << 20, clock=lambda: now_s)
    cache._max_new_bytes = 1 << 20
    few, many = tokens_of(0, 2), [tokens_of(n, 2) for n in range(1, 3)]
    insert(cache, few, SALTS[0])
    now_s = idle_s
    for prompt in many:
        insert(cache, prompt, SALTS[1])
    check(cache)
    left = [n_found(cache, few, SALTS[0]), n_found(cache, many[0], SALTS[1])]
    assert left == ([1, 2] if idle_s >= 600.0 else [2, 1])


def test_default_bounds_are_those_of_the_services() -> None:
    cache = PromptCache(block_tokens=BLOCK)
    assert cache._lru._max_bytes == service_bounds.MAX_PROMPT_MEMORY_BYTES
    assert cache._lru._max_tenant_bytes == service_bounds.MAX_TENANT_PROMPT_MEMORY_BYTES
    assert cache._min_tokens == service_bounds.MIN_PREFIX_REF_TOKENS
    assert cache._max_new_bytes == service_bounds.MAX_TENANT_PROMPT_MEMORY_BYTES / 2
