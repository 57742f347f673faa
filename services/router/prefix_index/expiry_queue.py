"""A queue of index nodes to check again, by the second. Pure.

A node is only in the list of its second, and one deletion removes it. So stale entries never accumulate, for
any number of nodes and of changes of their times.
"""

from __future__ import annotations

import heapq
import math

from services.router.prefix_index.block_node import BlockNode

_NOW_S = -math.inf


class ExpiryQueue:
    """Nodes by the second in which they are due, which is also in their `due_s`."""

    def __init__(self) -> None:
        self._nodes: dict[float, dict[BlockNode, None]] = {}  # by second
        self._seconds: list[float] = []  # a heap of the keys of `_nodes`

    def schedule_now(self, node: BlockNode) -> None:
        """Make the node due at once."""
        self.schedule(node, _NOW_S)

    def schedule(self, node: BlockNode, due_s: float) -> None:
        """Make the node due at this time of the caller's clock, rounded up, or earlier if it was before."""
        second = due_s if due_s == _NOW_S else float(math.ceil(due_s))
        if node.due_s is not None and node.due_s <= second:
            return
        self.remove(node)
        node.due_s = second
        nodes = self._nodes.get(second)
        if nodes is None:
            nodes = self._nodes[second] = {}
            heapq.heappush(self._seconds, second)
        nodes[node] = None

    def remove(self, node: BlockNode) -> None:
        """Remove the node, if it is queued."""
        if node.due_s is not None:
            del self._nodes[node.due_s][node]
            node.due_s = None

    def has_due(self, now_s: float) -> bool:
        """Whether any node is due."""
        while self._seconds and self._seconds[0] <= now_s:
            if self._nodes[self._seconds[0]]:
                return True
            del self._nodes[heapq.heappop(self._seconds)]
        return False

    def pop_due(self) -> BlockNode:
        """Remove and return a node of the first second, after `has_due`."""
        node, _ = self._nodes[self._seconds[0]].popitem()
        node.due_s = None
        return node

    def contains(self, node: BlockNode) -> bool:
        """Whether the node is in the list of its `due_s`."""
        return node.due_s is None or node in self._nodes.get(node.due_s, ())

    def __len__(self) -> int:
        return sum(map(len, self._nodes.values()))
