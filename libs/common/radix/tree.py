"""A radix tree, generic over keys and payload: split, merge, truncate, evict. Pure.

    class Node(RadixNode): ...                          # holds keys and payload
    tree = RadixTree(Node, TenantLru(max_bytes=.., max_tenant_bytes=..))
    cursor = RadixCursor([root])
    n_known = cursor.advance(keys)                      # the longest known prefix
    end = tree.open_end(cursor.path, cursor.at, tenant)
    end.append(..)                                      # the keys after it, with their payload
    tree.grew(end)
    tree.lru.touch(cursor.path[1:], tenant)
    tree.make_room([tenant])

A node holds consecutive keys. Chains that diverge split it; a node that is left with one child absorbs the
child. So the shape of the tree depends only on the chains in it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Generic

from libs.common.radix.lru import TenantLru
from libs.common.radix.node import NodeT

# An eviction removes at least this share of a node, so that the rest is not copied for each new key.
_MIN_EVICTED = 1 / 8


class RadixCursor(Generic[NodeT]):
    """A position in a tree: after `at` keys of the last node of `path`.

    Valid for one `version` of the tree.
    """

    __slots__ = ("at", "path")

    def __init__(self, path: list[NodeT], at: int = 0) -> None:
        """`path`: a root and the nodes below it in order."""
        self.path = path
        self.at = at

    @property
    def has_next(self) -> bool:
        """Whether any chain continues after this position."""
        node = self.path[-1]
        return self.at < len(node.keys) or bool(node.children)

    def step(self, key: Hashable) -> bool:
        """Advance by one key. Returns False, without moving, where no chain continues with it."""
        node = self.path[-1]
        if self.at < len(node.keys):
            if node.keys[self.at] != key:
                return False
            self.at += 1
            return True
        child = node.children.get(key)
        if child is None:
            return False
        self.path.append(child)
        self.at = 1
        return True

    def advance(self, keys: Sequence[Hashable]) -> int:
        """Advance along the longest known prefix of `keys`; returns its length."""
        for n, key in enumerate(keys):
            if not self.step(key):
                return n
        return len(keys)


class RadixTree(Generic[NodeT]):
    """Nodes of all tenants. A subclass that also indexes nodes by key overrides `split`, `merge`, `cut`.

    `version` changes whenever keys move between nodes, appear or disappear; paths found before are stale.
    """

    def __init__(self, new_node: Callable[[Hashable], NodeT], lru: TenantLru[NodeT]) -> None:
        """`new_node` makes an empty node of a tenant."""
        self._new_node = new_node
        self.lru = lru
        self.version = 0

    def add(self, tenant: Hashable, parent: NodeT | None = None) -> NodeT:
        """Make an empty node; `grew` links it once it has keys."""
        node = self._new_node(tenant)
        node.parent = parent
        self.lru.add(node)
        return node

    def open_end(self, path: list[NodeT], n_keys: int, tenant: Hashable) -> NodeT:
        """Return a childless node of the tenant to append to, after `n_keys` keys of the last node of `path`.

        Splits that node or adds one below it where necessary, and updates `path`. The caller appends keys
        and calls `grew`.
        """
        self.version += 1
        last = path[-1] if path else None
        if last is not None and n_keys < last.n_keys:
            last = path[-1] = self.split(last, n_keys)
        if last is None or last.children or not last.keys or last.tenant != tenant:
            last = self.add(tenant, last)
            path.append(last)
        return last

    def grew(self, node: NodeT) -> None:
        """Record that keys were appended to the node."""
        parent = node.parent
        if parent is not None and node.child_key not in parent.children:
            parent.link(node)
        self.lru.resize(node)

    def split(self, node: NodeT, n_keys: int) -> NodeT:
        """Move the first `n_keys` keys to a new parent of the node; returns the parent."""
        self.version += 1
        above = node.parent
        if above is not None:
            above.unlink(node)
        head = self.add(node.tenant)
        node.move_head(head, n_keys)
        if above is not None:
            above.link(head)
        head.link(node)
        self.lru.resize(head)
        self.lru.resize(node)
        return head

    def merge(self, node: NodeT) -> NodeT | None:
        """Absorb the only child if it is of the same tenant; returns the child, which is no node any more."""
        if len(node.children) != 1 or not node.keys:
            return None
        (child,) = node.children.values()
        if child.tenant != node.tenant:
            return None
        self.version += 1
        node.absorb(child)
        node.children = child.children
        for grandchild in node.children.values():
            grandchild.parent = node
        self.lru.remove(child)
        self.lru.resize(node)
        return child

    def cut(self, end: NodeT, n_keys: int) -> NodeT | None:
        """Truncate a childless node to `n_keys` keys, or remove it for 0; then returns its parent."""
        self.version += 1
        if n_keys:
            end.truncate(n_keys)
            self.lru.resize(end)
            return None
        self.lru.remove(end)
        if end.parent is not None:
            end.parent.unlink(end)
        return end.parent

    def make_room(self, tenants: Iterable[Hashable]) -> None:
        """Evict the least recently used ends until these tenants and all together keep their budgets."""
        for tenant in tenants:
            while (victim := self.lru.choose_victim(tenant)) is not None:
                end, excess_bytes = victim
                excess_bytes = max(excess_bytes, int(end.n_bytes * _MIN_EVICTED))
                self.evict(end, end.keys_after_eviction(excess_bytes))

    def evict(self, end: NodeT, n_keys: int) -> None:
        """Truncate a childless node to `n_keys` keys, and merge what the removal of a node leaves."""
        parent = self.cut(end, n_keys)
        if parent is not None:
            self.merge(parent)
