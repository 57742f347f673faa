"""The chain hash: published vectors, and the properties that make it an identity."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.common.block_hash import (
    SALT_LABEL,
    ChainState,
    HashChain,
    SharedPrefix,
    chain_hashes,
    extend_chain,
    shared_salt,
    tenant_salt,
)
from slipstream.block_hashes import pack_hashes, unpack_hashes
from slipstream.rpc.cluster_secret import ClusterSecret

ROOT = bytes(range(16))
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def token_ids(text: str) -> list[int]:
    """Token ids of a cell of the page; "0 1 ... 63" are those from 0 to 63."""
    head, _, last = text.partition(" ... ")
    ids = [int(i) for i in head.split()]
    return ids + list(range(ids[-1] + 1, int(last) + 1)) if last else ids


def test_the_vectors_of_the_specification() -> None:
    page = (Path(__file__).parents[2] / "docs" / "block-hash.md").read_text()
    pattern = r"^\| `([\w ]*)` \| `(\w*)` \| (\d+) \| (\d+) \| `([\d. ]*)` \| `([0-9a-f ]*)` \|$"
    rows = re.findall(pattern, page, re.MULTILINE)
    assert len(rows) >= 12
    for secret, tenant, n_shared, block_tokens, ids, expected in rows:
        key = ClusterSecret(secret.encode()).derive(SALT_LABEL) if secret else b""
        hashes = chain_hashes(
            token_ids(ids),
            root=ROOT,
            salt=tenant_salt(tenant, key=key),
            block_tokens=int(block_tokens),
            shared=SharedPrefix(shared_salt(key=key), int(n_shared)),
        )
        assert [h.hex() for h in hashes] == expected.split()


def test_a_tenants_hashes_need_the_secret() -> None:
    """The attack: a known tenant, a guessed prompt, and a look-up of its hashes."""
    ids, key = list(range(16)), ClusterSecret(b"the cluster's own secret").derive(SALT_LABEL)
    real = chain_hashes(ids, root=ROOT, salt=tenant_salt("anna", key=key), block_tokens=4)
    for guess in (b"", ClusterSecret(b"a guess of the secret").derive(SALT_LABEL)):
        found = chain_hashes(ids, root=ROOT, salt=tenant_salt("anna", key=guess), block_tokens=4)
        assert not set(found) & set(real)


@given(tokens, st.integers(0, 10), st.integers(0, 10))
def test_shared_blocks_are_those_of_every_tenant_and_no_more(ids: list[int], n_shared: int, cut: int) -> None:
    """Cut anywhere at a block, the chain is the same."""
    n_shared, cut = min(n_shared, len(ids) // 4), min(cut, len(ids) // 4)
    shared = SharedPrefix(b"all", n_shared)
    anna, bert = (
        chain_hashes(ids, root=ROOT, salt=salt, block_tokens=4, shared=shared) for salt in (b"a", b"b")
    )
    assert anna[:n_shared] == bert[:n_shared]
    assert not set(anna[n_shared:]) & set(bert[n_shared:])
    before = SharedPrefix(b"all", min(n_shared, cut))
    state, first = extend_chain(ChainState(ROOT), ids[: cut * 4], salt=b"a", block_tokens=4, shared=before)
    _, rest = extend_chain(state, ids[cut * 4 :], salt=b"a", block_tokens=4, shared=shared.after(cut))
    assert first + rest == anna


def test_shared_blocks_beyond_the_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="must be full"):
        chain_hashes([1] * 7, root=ROOT, salt=b"a", block_tokens=4, shared=SharedPrefix(b"s", 2))


@given(tokens, st.integers(1, 8), st.lists(st.integers(0, 40), max_size=5))
def test_extending_a_chain_in_any_pieces_equals_hashing_at_once(
    ids: list[int], block_tokens: int, cuts: list[int]
) -> None:
    chain = HashChain(root=ROOT, salt=b"s", block_tokens=block_tokens)
    edges = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    for start, end in itertools.pairwise(edges):
        chain.extend(ids[start:end])
    assert chain.hashes == chain_hashes(ids, root=ROOT, salt=b"s", block_tokens=block_tokens)
    assert len(chain.hashes) == len(ids) // block_tokens


def test_a_chain_keeps_no_reference_to_its_input_arrays() -> None:
    chain = HashChain(root=ROOT, salt=b"s", block_tokens=4)
    buffer = np.arange(6, dtype="<u4")
    chain.extend(buffer)
    buffer[:] = 99
    chain.extend([6, 7])
    assert chain.hashes == chain_hashes(list(range(8)), root=ROOT, salt=b"s", block_tokens=4)


@given(tokens, tokens)
def test_equal_prefixes_share_exactly_their_hashes(a: list[int], b: list[int]) -> None:
    ha, hb = (chain_hashes(ids, root=ROOT, salt=b"", block_tokens=4) for ids in (a, b))
    shared = 0
    while shared < min(len(a), len(b)) and a[shared] == b[shared]:
        shared += 1
    for index, (x, y) in enumerate(zip(ha, hb, strict=False)):
        assert (x == y) == (index < shared // 4)


def test_tenants_and_fingerprints_have_different_hashes() -> None:
    ids = list(range(8))
    seen = {
        chain_hashes(ids, root=root, salt=tenant_salt(tenant), block_tokens=4)[0]
        for root in (ROOT, ROOT[::-1])
        for tenant in ("a", "b")
    }
    assert len(seen) == 4


@given(st.lists(st.binary(min_size=16, max_size=16)))
def test_packing_round_trips(hashes: list[bytes]) -> None:
    assert unpack_hashes(pack_hashes(hashes)) == hashes


@pytest.mark.parametrize(
    "arguments",
    [
        {"root": b"short", "salt": b"", "block_tokens": 4},
        {"root": ROOT, "salt": bytes(65), "block_tokens": 4},
        {"root": ROOT, "salt": b"", "block_tokens": 0},
    ],
)
def test_unusable_parameters_are_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        HashChain(**arguments)  # type: ignore[arg-type]


def test_a_truncated_pack_is_refused() -> None:
    with pytest.raises(ValueError, match="no multiple of 16"):
        unpack_hashes(bytes(17))
