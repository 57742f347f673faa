"""The radix tree against a naive model: a dict of all prefixes per tenant, each with its payload."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Self

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from libs.common.radix.lru import TenantLru
from libs.common.radix.node import RadixNode
from libs.common.radix.tree import RadixCursor, RadixTree

NODE_BYTES, KEY_BYTES, TENANT_BYTES = 10, 3, 7
A_LOT = 10**9
CHAINS = st.lists(st.sampled_from("ab"), min_size=1, max_size=12)
TENANTS = ("t", "u")


class LetterNode(RadixNode):
    """A run of letters, each with a number as payload."""

    __slots__ = ("numbers",)

    def __init__(self, tenant: Hashable = None) -> None:
        super().__init__(tenant)
        self.keys: list[str] = []
        self.numbers: list[int] = []

    def size_bytes(self) -> int:
        return NODE_BYTES + KEY_BYTES * len(self.keys)

    def move_head(self, head: Self, n_keys: int) -> None:
        head.keys, self.keys = self.keys[:n_keys], self.keys[n_keys:]
        head.numbers, self.numbers = self.numbers[:n_keys], self.numbers[n_keys:]

    def absorb(self, child: Self) -> None:
        self.keys += child.keys
        self.numbers += child.numbers

    def truncate(self, n_keys: int) -> None:
        del self.keys[n_keys:], self.numbers[n_keys:]

    def keys_after_eviction(self, excess_bytes: int) -> int:
        return max(len(self.keys) - 1 - excess_bytes // KEY_BYTES, 0)


class Tree(RuleBasedStateMachine):
    """Chains are inserted, looked up and removed in any order."""

    max_bytes, max_tenant_bytes = A_LOT, A_LOT

    def __init__(self) -> None:
        super().__init__()
        self.lru = TenantLru[LetterNode](
            max_bytes=self.max_bytes, max_tenant_bytes=self.max_tenant_bytes, tenant_bytes=TENANT_BYTES
        )
        self.tree = RadixTree(LetterNode, self.lru)
        self.roots = {tenant: LetterNode() for tenant in TENANTS}
        self.model: dict[str, dict[str, int]] = {tenant: {} for tenant in TENANTS}
        self.inserted = 0

    def find(self, tenant: str, chain: list[str]) -> tuple[RadixCursor[LetterNode], int]:
        cursor = RadixCursor([self.roots[tenant]])
        return cursor, cursor.advance(chain)

    @rule(tenant=st.sampled_from(TENANTS), chain=CHAINS)
    def insert(self, tenant: str, chain: list[str]) -> None:
        cursor, n_known = self.find(tenant, chain)
        version = self.tree.version
        if n_known < len(chain):
            end = self.tree.open_end(cursor.path, cursor.at, tenant)
            for n in range(n_known, len(chain)):
                self.inserted += 1
                end.keys.append(chain[n])
                end.numbers.append(self.inserted)
                self.model[tenant]["".join(chain[: n + 1])] = self.inserted
            self.tree.grew(end)
        self.lru.touch(cursor.path[1:], tenant)
        self.tree.make_room([tenant])
        assert (self.tree.version > version) == (n_known < len(chain))
        self.remove_evicted_from_model()

    def remove_evicted_from_model(self) -> None:
        """Remove each evicted prefix and all its continuations from the model."""
        for tenant, prefixes in self.model.items():
            for prefix in list(prefixes):
                if self.find(tenant, list(prefix))[1] < len(prefix):
                    assert self.max_bytes < A_LOT
                    del prefixes[prefix]

    @rule(tenant=st.sampled_from(TENANTS), chain=CHAINS)
    def use(self, tenant: str, chain: list[str]) -> None:
        cursor, n_known = self.find(tenant, chain)
        expected = next(
            n for n in range(len(chain), -1, -1) if not n or "".join(chain[:n]) in self.model[tenant]
        )
        assert n_known == expected
        numbers = [number for node in cursor.path for number in node.numbers][:n_known]
        assert numbers == [self.model[tenant]["".join(chain[: n + 1])] for n in range(n_known)]
        assert cursor.has_next == any(
            prefix.startswith("".join(chain[:n_known])) and len(prefix) > n_known
            for prefix in self.model[tenant]
        )
        self.lru.touch(cursor.path[1:], tenant)

    @precondition(lambda self: any(self.model.values()))
    @rule(data=st.data())
    def remove_end(self, data: st.DataObject) -> None:
        """Remove the last keys of a chain without continuation."""
        ends = [
            (tenant, prefix)
            for tenant, prefixes in self.model.items()
            for prefix in sorted(prefixes)
            if not any(other.startswith(prefix) and other != prefix for other in prefixes)
        ]
        tenant, prefix = data.draw(st.sampled_from(ends))
        cursor, _ = self.find(tenant, list(prefix))
        node = cursor.path[-1]
        n_kept = data.draw(st.integers(0, len(node.keys) - 1))
        for n in range(len(node.keys) - n_kept):
            del self.model[tenant][prefix[: len(prefix) - n]]
        version = self.tree.version
        self.tree.evict(node, n_kept)
        assert self.tree.version > version

    @invariant()
    def tree_equals_the_model(self) -> None:
        in_all = 0
        for tenant, root in self.roots.items():
            found: dict[str, int] = {}
            nodes = list(_collect(root, "", found))
            assert found == self.model[tenant]
            order = {id(node): at for at, node in enumerate(self.lru.nodes(tenant))}
            assert set(order) == set(map(id, nodes))
            n_bytes = sum(node.n_bytes for node in nodes) + TENANT_BYTES * bool(nodes)
            assert n_bytes == self.lru.tenant_bytes(tenant) <= self.max_tenant_bytes
            for node in nodes:
                assert node.keys and len(node.children) != 1  # nodes are merged as far as possible
                assert node.n_bytes == node.size_bytes()
                assert node.parent is root or order[id(node)] < order[id(node.parent)]
            in_all += n_bytes
        assert in_all == self.lru.n_bytes <= self.max_bytes


class CrowdedTree(Tree):
    """The same tests with budgets so small that the tree evicts."""

    max_bytes, max_tenant_bytes = 150, 110


def _collect(node: LetterNode, prefix: str, found: dict[str, int]) -> list[LetterNode]:
    """Return all nodes below `node`, and add each prefix that ends in them to `found`."""
    below: list[LetterNode] = []
    for child in node.children.values():
        assert child.parent is node
        for n, number in enumerate(child.numbers, 1):
            found[prefix + "".join(child.keys[:n])] = number
        below += [child, *_collect(child, prefix + "".join(child.keys), found)]
    return below


TestTree = Tree.TestCase
TestTree.settings = settings(stateful_step_count=30, deadline=None)
TestCrowdedTree = CrowdedTree.TestCase
TestCrowdedTree.settings = settings(stateful_step_count=30, deadline=None)


def _insert(
    tree: RadixTree[LetterNode], tenant: str, word: str, *, parent: LetterNode | None = None
) -> LetterNode:
    end = tree.open_end([] if parent is None else [parent], parent.n_keys if parent else 0, tenant)
    end.keys += word
    end.numbers += range(len(word))
    tree.grew(end)
    return end


def test_the_least_recently_used_end_is_evicted_first() -> None:
    lru = TenantLru[LetterNode](max_bytes=3 * 40, max_tenant_bytes=A_LOT)
    tree = RadixTree(LetterNode, lru)
    first, second, third = (_insert(tree, "t", letter * 10) for letter in "abc")
    lru.touch([first], "t")
    _insert(tree, "t", "d" * 10)
    tree.make_room(["t"])
    assert (first.n_keys, third.n_keys, second in lru.nodes("t")) == (10, 10, False)
    assert second.n_bytes == 0


@pytest.mark.parametrize("is_of_tenant", [False, True])
def test_a_budget_holds_to_the_byte(is_of_tenant: bool) -> None:
    for most_bytes, n_kept in ((40, 10), (39, 8)):  # an eviction takes an eighth at least
        in_all_bytes, tenant_bytes = (A_LOT, most_bytes) if is_of_tenant else (most_bytes, A_LOT)
        lru = TenantLru[LetterNode](max_bytes=in_all_bytes, max_tenant_bytes=tenant_bytes)
        tree = RadixTree(LetterNode, lru)
        end = _insert(tree, "t", "a" * 10)
        tree.make_room(["t"])
        assert end.n_keys == n_kept


def test_a_tenant_over_its_share_is_evicted_before_a_smaller_one() -> None:
    lru = TenantLru[LetterNode](max_bytes=200, max_tenant_bytes=A_LOT)
    tree = RadixTree(LetterNode, lru)
    few = _insert(tree, "few", "a" * 10)
    for n in range(50):
        many = _insert(tree, "many", "b" * (n % 7 + 1))
        lru.touch([many], "many")
        tree.make_room(["many"])
    assert few.n_keys == 10
    assert lru.n_bytes <= 200


@pytest.mark.parametrize(("passed_s", "evicted"), [(59.0, "busy"), (60.0, "idle")])
def test_an_idle_tenant_is_evicted_before_larger_ones(passed_s: float, evicted: str) -> None:
    now_s = 1000.0
    lru = TenantLru[LetterNode](max_bytes=100, max_tenant_bytes=A_LOT, idle_s=60.0, clock=lambda: now_s)
    tree = RadixTree(LetterNode, lru)
    busy = _insert(tree, "busy", "b" * 25)
    lru.touch([_insert(tree, "idle", "a" * 5)], "idle")
    now_s += passed_s
    lru.touch([busy], "busy")
    tree.make_room(["busy"])
    full_bytes = {"idle": 25, "busy": 85}
    assert [t for t, n_bytes in full_bytes.items() if lru.tenant_bytes(t) < n_bytes] == [evicted]


def test_an_eviction_takes_an_eighth_of_a_long_node_and_leaves_the_rest() -> None:
    """A key that is too much does not have the rest copied for each further key."""
    lru = TenantLru[LetterNode](max_bytes=NODE_BYTES + 80 * KEY_BYTES, max_tenant_bytes=A_LOT)
    tree = RadixTree(LetterNode, lru)
    end = _insert(tree, "t", "a" * 81)
    n_evicted = -(-end.n_bytes // 8 // KEY_BYTES)
    tree.make_room(["t"])
    assert 81 - n_evicted - 1 <= end.n_keys <= 81 - n_evicted + 1


def test_a_chain_may_continue_below_another_tenants_node() -> None:
    lru = TenantLru[LetterNode](max_bytes=A_LOT, max_tenant_bytes=60)
    tree = RadixTree(LetterNode, lru)
    above = _insert(tree, "t", "aaaa")
    below = _insert(tree, "u", "bb", parent=above)
    assert (below.parent, tree.merge(above)) == (above, None)
    lru.touch([above, below], "u")
    _insert(tree, "t", "c" * 16)
    tree.make_room(["t"])
    # Eviction starts at an end, even at another tenant's node; then its parent is evictable.
    assert lru.tenant_bytes("t") <= 60
    assert (lru.tenant_bytes("u"), above.children) == (0, {})
