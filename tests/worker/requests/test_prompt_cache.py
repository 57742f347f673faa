"""Cached prompts of workers: equal to the prompts sent, separate by tenant, within bounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.common.block_hash import SharedPrefix, TokenArray, as_tokens, chain_hashes, tenant_salt
from libs.worker.requests.prompt_cache import PromptCache
from libs.worker.requests.request_spec import parse_prompt
from slipstream.block_hashes import pack_hashes
from slipstream.errors import InvalidArgument, PrefixUnknown
from slipstream.v1 import common_pb2

BLOCK = 4
ROOT = bytes(16)
SALTS = [tenant_salt(name) for name in ("a", "b")]


def hashes_of(tokens: list[int], salt: bytes) -> list[bytes]:
    return chain_hashes(tokens, root=ROOT, salt=salt, block_tokens=BLOCK)


def parse(
    cache: PromptCache, tokens: list[int], salt: bytes, *, blocks: int = 0, name: bytes | None = None
) -> tuple[TokenArray, tuple[bytes, ...]]:
    """Parse a prompt as a worker does, with a reference to its first `blocks` blocks."""
    hashes = hashes_of(tokens, salt)
    prefix = common_pb2.PromptReference()
    if blocks:
        prefix = common_pb2.PromptReference(blocks=blocks, hash=name or hashes[blocks - 1])
    return parse_prompt(
        as_tokens(tokens[blocks * BLOCK :]).tobytes(),
        pack_hashes(hashes[blocks:]),
        prefix,
        root=ROOT,
        salt=salt,
        memory=cache,
        block_tokens=BLOCK,
    )


def new_cache(**bounds: Any) -> PromptCache:
    return PromptCache(block_tokens=BLOCK, min_tokens=BLOCK, **bounds)


# Prompts over few different ids often share prefixes.
_prompts = st.lists(st.integers(0, 1), min_size=1, max_size=40)


@given(
    st.lists(st.tuples(_prompts, st.sampled_from(SALTS), st.integers(0, 10)), max_size=25),
    st.sampled_from([2_000, 5_000, 1 << 20]),
)
def test_a_prefix_is_found_for_the_tenant_that_sent_it_or_unknown(
    requests: list[tuple[list[int], bytes, int]], max_bytes: int
) -> None:
    cache = new_cache(max_bytes=max_bytes, max_tenant_bytes=max_bytes * 3 // 4)
    sent: dict[bytes, set[bytes]] = {salt: set() for salt in SALTS}
    for tokens, salt, wanted in requests:
        hashes = hashes_of(tokens, salt)
        blocks = min(wanted, len(hashes))
        try:
            ids, own = parse(cache, tokens, salt, blocks=blocks)
        except PrefixUnknown:
            # Only a small cache may have evicted the prefix.
            assert max_bytes < 1 << 20 or hashes[blocks - 1] not in sent[salt]
            ids, own = parse(cache, tokens, salt)
        else:
            assert not blocks or hashes[blocks - 1] in sent[salt]
        assert ids.tolist() == tokens
        assert list(own) == hashes
        sent[salt].update(hashes)
        assert cache.n_bytes == sum(map(cache.tenant_bytes, SALTS)) <= max_bytes
        assert all(cache.tenant_bytes(of) <= max_bytes * 3 // 4 for of in SALTS)


@given(_prompts.filter(lambda tokens: len(tokens) >= BLOCK))
def test_prompts_of_another_tenant_are_unknown(tokens: list[int]) -> None:
    cache = new_cache()
    parse(cache, tokens, SALTS[0])
    blocks = len(tokens) // BLOCK
    theirs = hashes_of(tokens, SALTS[0])[blocks - 1]
    for name in (None, theirs):  # the hash under its own salt, and the hash of the other tenant
        with pytest.raises(PrefixUnknown):
            parse(cache, tokens, SALTS[1], blocks=blocks, name=name)
    assert cache.tenant_bytes(SALTS[1]) == 0


def test_a_hash_and_its_number_of_blocks_must_match() -> None:
    cache, tokens = new_cache(), list(range(20))
    parse(cache, tokens, SALTS[0])
    name = hashes_of(tokens, SALTS[0])[2]
    assert cache.find(SALTS[0], name, blocks=3) is not None
    for blocks in (1, 2, 4, 5, 2**32 - 1):
        assert cache.find(SALTS[0], name, blocks=blocks) is None
    assert (cache.hits, cache.misses) == (1, 5)


def test_wrong_hashes_after_a_prefix_are_refused_and_not_cached() -> None:
    cache, tokens = new_cache(), list(range(20))
    parse(cache, tokens[:12], SALTS[0])
    n_bytes = cache.n_bytes
    wrong = hashes_of([*tokens[:16], 9, 9, 9, 9], SALTS[0])
    reference = common_pb2.PromptReference(blocks=3, hash=hashes_of(tokens, SALTS[0])[2])
    with pytest.raises(InvalidArgument, match="block_hashes"):
        parse_prompt(
            as_tokens(tokens[12:]).tobytes(),
            pack_hashes(wrong[3:]),
            reference,
            root=ROOT,
            salt=SALTS[0],
            memory=cache,
            block_tokens=BLOCK,
        )
    assert cache.n_bytes == n_bytes


def test_a_turn_adds_only_new_blocks_and_active_conversations_stay_cached() -> None:
    talk = np.random.default_rng(0).integers(0, 1000, 400).tolist()
    cache = new_cache(max_bytes=80_000, max_tenant_bytes=80_000)
    parse(cache, talk[:200], SALTS[0])
    before = cache.n_bytes
    parse(cache, talk[:208], SALTS[0], blocks=50)
    assert cache.n_bytes - before < 1_000
    for other in range(40):
        parse(cache, [other, *range(200)], SALTS[0])
        talked = 208 + BLOCK * (other + 1)
        parse(cache, talk[:talked], SALTS[0], blocks=talked // BLOCK - 1)
    assert cache.misses == 0
    with pytest.raises(PrefixUnknown):
        parse(cache, [0, *range(200)], SALTS[0], blocks=50)


def test_one_long_prompt_does_not_evict_all_others() -> None:
    cache = new_cache(max_bytes=20_000, max_tenant_bytes=20_000)
    parse(cache, list(range(40)), SALTS[0])
    kept = cache.n_bytes
    parse(cache, list(range(1000, 2000)), SALTS[0])
    assert cache.n_bytes == kept > 0
    parse(cache, list(range(40)), SALTS[0], blocks=10)


def test_many_prompts_of_one_tenant_do_not_evict_the_few_of_another() -> None:
    cache = new_cache(max_bytes=20_000, max_tenant_bytes=18_000)
    few = list(range(16))
    parse(cache, few, SALTS[0])
    for n in range(100):
        parse(cache, [n, *range(15)], SALTS[1])
    parse(cache, few, SALTS[0], blocks=4)
    assert cache.tenant_bytes(SALTS[1]) > 10_000


def test_prompts_of_an_idle_tenant_are_evicted_first() -> None:
    now_s = 0.0
    cache = PromptCache(
        block_tokens=BLOCK, min_tokens=BLOCK, max_bytes=20_000, max_tenant_bytes=15_000, clock=lambda: now_s
    )
    for n in range(100):
        parse(cache, [n, *range(15)], SALTS[0])
    assert cache.tenant_bytes(SALTS[0]) > 13_000
    for hour in range(1, 4):
        now_s = 3600.0 * hour
        for n in range(100):
            parse(cache, [n, *range(15)], SALTS[hour % 2])
        assert cache.tenant_bytes(SALTS[hour % 2]) > 13_000
        assert cache.n_bytes <= 20_000


def test_short_prompts_are_not_cached() -> None:
    cache = PromptCache(block_tokens=BLOCK)
    parse(cache, list(range(1023)), SALTS[0])
    assert cache.n_bytes == 0
    parse(cache, list(range(1024)), SALTS[0])
    assert cache.n_bytes > 4096


def test_a_long_conversation_is_few_nodes_and_its_branches_are_found() -> None:
    cache = new_cache()
    rng = np.random.default_rng(1)
    tokens: list[int] = rng.integers(0, 9, 40).tolist()
    for _ in range(400):
        tokens += rng.integers(0, 9, int(rng.integers(1, 30))).tolist()
        ids, hashes = as_tokens(tokens), hashes_of(tokens, SALTS[0])
        cache.insert(SALTS[0], ids, hashes)
    middle = len(hashes) // 2
    branch = [*tokens[: middle * BLOCK], *([77] * 8)]
    cache.insert(SALTS[0], as_tokens(branch), hashes_of(branch, SALTS[0]))
    for prompt in (tokens, branch):
        of = hashes_of(prompt, SALTS[0])
        found = cache.find(SALTS[0], of[-1], blocks=len(of))
        assert found is not None
        assert list(found.hashes) == of
        assert np.frombuffer(b"".join(found.ids), "<u4").tolist() == prompt[: len(of) * BLOCK]
        assert len(found.ids) <= 12
    assert cache.n_bytes < 1.2 * (160 * (len(hashes) + 2) + 4 * len(tokens))


def test_prompts_that_diverge_within_a_node_are_both_cached() -> None:
    cache = new_cache()
    first, second = [1] * 40, [1] * 16 + [2] * 60
    for tokens in (first, second, [*second, *([3] * 200)]):
        cache.insert(SALTS[0], as_tokens(tokens), hashes_of(tokens, SALTS[0]))
    for tokens in (first, second):
        of = hashes_of(tokens, SALTS[0])
        found = cache.find(SALTS[0], of[-1], blocks=len(of))
        assert found is not None
        assert np.frombuffer(b"".join(found.ids), "<u4").tolist() == tokens


def test_conversations_of_many_turns_stay_within_the_bounds() -> None:
    cache = new_cache(max_bytes=20_000, max_tenant_bytes=12_000)
    for name in range(30):
        tokens = [name] * 8
        for _ in range(12):
            tokens += [name] * 8
            cache.insert(SALTS[name % 2], as_tokens(tokens), hashes_of(tokens, SALTS[name % 2]))
        assert cache.n_bytes == sum(map(cache.tenant_bytes, SALTS)) <= 20_000
    assert cache.find(SALTS[1], hashes_of([29] * 8, SALTS[1])[-1], blocks=2) is not None
    assert cache.find(SALTS[0], hashes_of([0] * 8, SALTS[0])[-1], blocks=2) is None


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_a_reference_may_end_within_a_shared_prefix(blocks: int) -> None:
    """And no tenant refers to a prompt of another one, shared or not."""
    cache, tokens, shared = new_cache(), list(range(5 * BLOCK)), SharedPrefix(b"all", 2)
    hashes = chain_hashes(tokens, root=ROOT, salt=SALTS[0], block_tokens=BLOCK, shared=shared)

    def take(salt: bytes, blocks: int) -> tuple[bytes, ...]:
        prefix = common_pb2.PromptReference()
        if blocks:
            prefix = common_pb2.PromptReference(blocks=blocks, hash=hashes[blocks - 1])
        return parse_prompt(
            as_tokens(tokens[blocks * BLOCK :]).tobytes(),
            pack_hashes(hashes[blocks:]),
            prefix,
            root=ROOT,
            salt=salt,
            memory=cache,
            block_tokens=BLOCK,
            shared=shared,
        )[1]

    assert list(take(SALTS[0], 0)) == hashes
    assert list(take(SALTS[0], blocks)) == hashes
    with pytest.raises(PrefixUnknown):
        take(SALTS[1], blocks)
