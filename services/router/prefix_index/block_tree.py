"""The radix tree of blocks, with a hash table from a block's key to its node. Pure.

A block's hash identifies all blocks before it, so the table finds a chain by any of its blocks. Detached
nodes lie beside the tree. Each call removes a bounded number of expired blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator

from libs.common.radix.lru import TenantLru
from libs.common.radix.tree import RadixTree
from services.router.prefix_index.block_node import (
    BlockNode,
    ConfirmedBlocks,
    PredictedBlocks,
    leading_ones,
)
from services.router.prefix_index.expiry_queue import ExpiryQueue
from services.router.prefix_index.hash_table import KEY_BYTES, HashTable
from slipstream.errors import Internal

# A block's number in the table: the number of its node, then its position in its chain or detached node.
_POSITION_BITS = 24
_POSITION = (1 << _POSITION_BITS) - 1
# Checking a node, or removing a departed holder from it, costs as much as removing this many blocks.
NODE_COST_BLOCKS = 8


class BlockTree(RadixTree[BlockNode]):
    """See the module's text. A caller that changes a node's claims then calls `lru.resize` or `reconcile`."""

    def __init__(self, *, max_bytes: int, max_tenant_bytes: int) -> None:
        lru = TenantLru[BlockNode](max_bytes=max_bytes, max_tenant_bytes=max_tenant_bytes)
        super().__init__(self._make_node, lru)
        self._table = HashTable()
        self._nodes: dict[int, BlockNode] = {}  # by number
        self._numbers = itertools.count()
        self._expiry = ExpiryQueue()
        self.evicted_blocks = 0

    def _make_node(self, tenant: Hashable) -> BlockNode:
        node = BlockNode(tenant, next(self._numbers))
        self._nodes[node.number] = node
        return node

    @property
    def n_blocks(self) -> int:
        """The number of different blocks."""
        return len(self._table)

    @property
    def n_nodes(self) -> int:
        """The number of nodes, detached ones included."""
        return len(self._nodes)

    # ---- find and extend

    def find(self, key: bytes) -> tuple[BlockNode, int] | None:
        """A block's node, and its position in its chain or detached node."""
        number = self._table.get(key)
        return None if number < 0 else (self._nodes[number >> _POSITION_BITS], number & _POSITION)

    def contains(self, node: BlockNode) -> bool:
        """Whether the node has not been merged or removed."""
        return self._nodes.get(node.number) is node

    def extend(self, node: BlockNode, keys: bytes) -> list[tuple[int, BlockNode, int]]:
        """Append blocks. The caller calls `grew` after it has set their claims.

        Returns, for each block that was in another node: its index in `keys`, that node, its position there.
        """
        if not node.keys and node.parent is not None:
            node.first_block = node.parent.end
        replaced = self._table.put_all(keys, _number_of(node, node.n_keys))
        node.keys += keys
        self.version += 1
        return [(at, self._nodes[number >> _POSITION_BITS], number & _POSITION) for at, number in replaced]

    def drop_unclaimed(self, node: BlockNode, mask: int) -> None:
        """Remove those of some blocks of a detached node that no holder has."""
        for bits in node.confirmed.values():
            mask &= ~bits
        while mask:
            first = leading_ones(~mask)
            length = leading_ones(mask >> first)
            keys = node.keys[first * KEY_BYTES : (first + length) * KEY_BYTES]
            self._table.discard_all(keys, _number_of(node, first))
            node.blank(first, length)
            mask &= mask + (1 << first)  # the carry clears this series of bits

    # ---- split, merge, cut

    def split(self, node: BlockNode, n_keys: int) -> BlockNode:
        head = super().split(node, n_keys)
        shorter = head
        if head.n_keys > node.n_keys:
            self._swap_numbers(head, node)
            shorter = node
        self._table.put_all(shorter.keys, _number_of(shorter, 0))
        self._schedule(head)
        self._schedule(node)
        return head

    def merge(self, node: BlockNode) -> BlockNode | None:
        n_keys = node.n_keys
        child = super().merge(node)
        if child is None:
            return None
        if child.n_keys > n_keys:
            self._swap_numbers(node, child)
            self._table.put_all(node.keys[: n_keys * KEY_BYTES], _number_of(node, 0))
        else:
            self._table.put_all(child.keys, _number_of(node, n_keys))
        self._remove(child)
        self._schedule(node)
        return child

    def cut(self, end: BlockNode, n_keys: int) -> BlockNode | None:
        if n_keys < end.n_keys:
            self._table.discard_all(end.keys[n_keys * KEY_BYTES :], _number_of(end, n_keys))
        if not n_keys:
            end.drop_claims()
            self._remove(end)
        return super().cut(end, n_keys)

    def evict(self, end: BlockNode, n_keys: int) -> None:
        self.evicted_blocks += end.n_keys - n_keys
        parent = self.cut(end, n_keys)
        self.reconcile(end if n_keys else parent)  # no holder may have what remains

    def reconcile(self, node: BlockNode | None, *, max_blocks: int = _POSITION) -> int:
        """Remove the blocks that no holder has from the end of a chain, and merge what has one child left.

        Returns how many blocks were removed; beyond `max_blocks` the rest is left to `clean_up`.
        """
        n_removed = 0
        while node is not None:
            if node.children:
                if self.merge(node) is None:
                    self.lru.resize(node)
                break
            kept = node.claimed_blocks if node.tenant is not None or not node.confirmed else node.n_keys
            if node.n_keys - kept > max_blocks - n_removed:
                kept = node.n_keys - (max_blocks - n_removed)
                self.check_soon(node)
            n_removed += node.n_keys - kept
            if kept == node.n_keys:
                self.lru.resize(node)
                break
            node = self.cut(node, kept)
        return n_removed

    def _swap_numbers(self, a: BlockNode, b: BlockNode) -> None:
        """Swap the numbers of two nodes, so that the blocks of the longer one keep theirs in the table."""
        a.number, b.number = b.number, a.number
        self._nodes[a.number], self._nodes[b.number] = a, b

    def _remove(self, node: BlockNode) -> None:
        self._expiry.remove(node)
        del self._nodes[node.number]

    # ---- expiry

    def clean_up(self, now_s: float, *, max_blocks: int) -> int:
        """Remove expired predictions and the blocks that no holder has then. Returns the unused rest of
        `max_blocks`; 0: there may be more to remove."""
        while max_blocks > 0 and self._expiry.has_due(now_s):
            node = self._expiry.pop_due()
            node.expire_predictions(now_s)
            if node.predicted:
                self._schedule(node)
            max_blocks -= NODE_COST_BLOCKS + self.reconcile(node, max_blocks=max_blocks)
        return max(max_blocks, 0)

    def check_soon(self, node: BlockNode) -> None:
        """Have the next `clean_up` check the node: a holder has lost blocks of it."""
        self._expiry.schedule_now(node)

    def predicted(self, node: BlockNode, until_s: float) -> None:
        """Record that a prediction was added to the node, which `clean_up` checks when it expires."""
        self.lru.resize(node)
        self._expiry.schedule(node, until_s)

    def _schedule(self, node: BlockNode) -> None:
        """Check the node when its last prediction expires, or at once without any."""
        self._expiry.remove(node)
        if node.predicted:
            self._expiry.schedule(node, max([each[-1][1] for each in node.predicted.values()]))
        else:
            self._expiry.schedule_now(node)

    # ---- for tests

    def check(self) -> None:
        """Raises Internal when the index contradicts itself."""
        errors = [error for number, node in self._nodes.items() for error in self._node_errors(number, node)]
        if len(self._expiry) != sum(node.due_s is not None for node in self._nodes.values()):
            errors.append("the expiry queue holds nodes that do not exist")
        if sum(node.n_bytes for node in self._nodes.values()) != self.lru.n_bytes:
            errors.append("the bytes do not add up")
        if errors:
            raise Internal("; ".join(errors))

    def _node_errors(self, number: int, node: BlockNode) -> Iterator[str]:
        first, n_keys = _number_of(node, 0), node.n_keys
        found = [self._table.get(node.keys[i * KEY_BYTES :][:KEY_BYTES]) for i in range(n_keys)]
        if node.tenant is not None and found != list(range(first, first + n_keys)):
            yield f"the blocks of node {number} are not found"
        if node.number != number or not n_keys or node.n_bytes != node.size_bytes():
            yield f"node {number} has a wrong number, length or size"
        if any(child.parent is not node or child.first_block != node.end for child in node.children.values()):
            yield f"the children of node {number} do not continue it"
        if len(node.children) == 1:
            yield f"node {number} is not merged with its only child"
        holders: list[ConfirmedBlocks | PredictedBlocks] = [*node.confirmed, *node.predicted]
        if any(node not in claims.nodes for claims in holders):
            yield f"a holder of node {number} does not refer to it"
        if max((bits.bit_length() for bits in node.confirmed.values()), default=0) > n_keys:
            yield f"a holder has more blocks of node {number} than it has"
        if not self._expiry.contains(node):
            yield f"node {number} is not in the expiry queue"


def _number_of(node: BlockNode, index: int) -> int:
    """The number in the table of a node's block."""
    return node.number << _POSITION_BITS | node.first_block + index
