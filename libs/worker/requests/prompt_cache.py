"""Caches the prompts that a worker received, so that later prompts can refer to a common prefix. Pure.

Each tenant, by its salt, has a radix tree of blocks and a table from a block's chain hash to its node. The
hash identifies the whole prefix up to the block (docs/block-hash.md). No tenant finds another's prompt.

Memory is bounded for each tenant and in all. Evictions over the total bound begin with tenants that sent
nothing for some minutes, then continue with those that have the most bytes. So one tenant's many prompts do
not evict another's few. Only ends are evicted: the cache has a block only together with all blocks before it.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Self

from libs.common import service_bounds
from libs.common.block_hash import TokenArray
from libs.common.radix.lru import TenantLru
from libs.common.radix.node import RadixNode
from libs.common.radix.tree import RadixTree

_NODE_BYTES = 500  # objects around the data
_BLOCK_BYTES = 160  # a block's hash and its entry in the table
# New blocks that take more than this share of a tenant's bound would evict all others, and are not cached.
_MAX_SHARE = 0.5
# A part is joined with the next one unless it is longer by more than this factor.
_JOINED_RATIO = 2
# Evictions begin with tenants that sent no prompt for this long.
_IDLE_S = 600.0


class PromptNode(RadixNode):
    """Consecutive full blocks of prompts, the first of them block `first_block`. `keys`: their hashes.

    `parts` are their packed token ids, `ids_bytes` in all. One growing buffer would lose a quarter of the
    memory to fragmentation. A part that is not much longer than the next one is joined with it. So there are
    few parts and each id is copied log2(n) times.
    """

    __slots__ = ("first_block", "ids_bytes", "parts")

    def __init__(self, tenant: Hashable) -> None:
        super().__init__(tenant)
        self.first_block = 0
        self.keys: list[bytes] = []
        self.parts: list[bytes] = []
        self.ids_bytes = 0

    @property
    def block_bytes(self) -> int:
        """The bytes of a block's ids."""
        return self.ids_bytes // len(self.keys)

    def append(self, hashes: Sequence[bytes], parts: Sequence[bytes]) -> None:
        """Append blocks."""
        self.keys += hashes
        for part in parts:
            self.ids_bytes += len(part)
            self.parts.append(part)
            while len(self.parts) > 1 and len(self.parts[-2]) <= _JOINED_RATIO * len(self.parts[-1]):
                self.parts[-2:] = [b"".join(self.parts[-2:])]

    def ids(self, n_blocks: int) -> list[bytes]:
        """The ids of the first blocks, in parts."""
        if n_blocks == len(self.keys):
            return self.parts
        return [b"".join(self.parts)[: n_blocks * self.block_bytes]]

    def size_bytes(self) -> int:
        return _NODE_BYTES + self.ids_bytes + _BLOCK_BYTES * len(self.keys)

    def keys_after_eviction(self, excess_bytes: int) -> int:
        n_evicted = -(-excess_bytes // (_BLOCK_BYTES + self.block_bytes))
        return max(len(self.keys) - n_evicted, 0)

    def move_head(self, head: Self, n_keys: int) -> None:
        n_bytes, ids = n_keys * self.block_bytes, b"".join(self.parts)
        head.first_block, self.first_block = self.first_block, self.first_block + n_keys
        head.keys, self.keys = self.keys[:n_keys], self.keys[n_keys:]
        head.parts, self.parts = [ids[:n_bytes]], [ids[n_bytes:]]
        head.ids_bytes, self.ids_bytes = n_bytes, len(ids) - n_bytes

    def absorb(self, child: Self) -> None:
        self.append(child.keys, child.parts)

    def truncate(self, n_keys: int) -> None:
        self.parts = self.ids(n_keys)
        self.ids_bytes = sum(map(len, self.parts))
        self.keys = self.keys[:n_keys]


class _PromptTree(RadixTree[PromptNode]):
    """The trees of all tenants. `tables`: for each, the node of each block by hash."""

    def __init__(self, lru: TenantLru[PromptNode]) -> None:
        super().__init__(PromptNode, lru)
        self.tables: dict[Hashable, dict[bytes, PromptNode]] = {}

    def append(self, node: PromptNode, hashes: Sequence[bytes], ids: bytes) -> None:
        """Append blocks to a childless node."""
        if not node.keys and node.parent is not None:
            node.first_block = node.parent.first_block + len(node.parent.keys)
        node.append(hashes, [ids])
        self.tables.setdefault(node.tenant, {}).update(dict.fromkeys(hashes, node))
        self.grew(node)

    def split(self, node: PromptNode, n_keys: int) -> PromptNode:
        head = super().split(node, n_keys)
        self.tables[node.tenant].update(dict.fromkeys(head.keys, head))
        return head

    def merge(self, node: PromptNode) -> PromptNode | None:
        child = super().merge(node)
        if child is not None:
            self.tables[node.tenant].update(dict.fromkeys(child.keys, node))
        return child

    def cut(self, end: PromptNode, n_keys: int) -> PromptNode | None:
        table = self.tables[end.tenant]
        for block_hash in end.keys[n_keys:]:
            del table[block_hash]
        if not table:
            del self.tables[end.tenant]
        return super().cut(end, n_keys)


@dataclass(frozen=True, slots=True)
class Prefix:
    """Leading full blocks of a prompt: packed ids, in parts, and the hashes of the blocks."""

    ids: Sequence[bytes] = ()
    hashes: Sequence[bytes] = ()


class PromptCache:
    """See the module's text. Not thread-safe."""

    def __init__(
        self,
        *,
        block_tokens: int,
        max_bytes: int = service_bounds.MAX_PROMPT_MEMORY_BYTES,
        max_tenant_bytes: int = service_bounds.MAX_TENANT_PROMPT_MEMORY_BYTES,
        min_tokens: int = service_bounds.MIN_PREFIX_REF_TOKENS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`min_tokens`: shorter prompts are not cached."""
        self._block_tokens = block_tokens
        self._max_new_bytes = _MAX_SHARE * min(max_tenant_bytes, max_bytes)
        self._min_tokens = min_tokens
        self._lru = TenantLru[PromptNode](
            max_bytes=max_bytes, max_tenant_bytes=max_tenant_bytes, idle_s=_IDLE_S, clock=clock
        )
        self._tree = _PromptTree(self._lru)
        self.hits = 0
        self.misses = 0

    @property
    def n_bytes(self) -> int:
        """The approximate memory of the cache."""
        return self._lru.n_bytes

    def tenant_bytes(self, salt: bytes) -> int:
        """The approximate memory of a tenant's prompts."""
        return self._lru.tenant_bytes(salt)

    def find(self, salt: bytes, block_hash: bytes, *, blocks: int) -> Prefix | None:
        """The tenant's prefix of `blocks` blocks whose last block has this hash; None if it is not cached."""
        node = self._tree.tables.get(salt, {}).get(block_hash)
        last = blocks - node.first_block - 1 if node is not None else -1
        if node is None or not 0 <= last < len(node.keys) or node.keys[last] != block_hash:
            self.misses += 1
            return None
        self.hits += 1
        path = _path_to(node)
        self._lru.touch(path, salt)
        ids = [part for each in path[:-1] for part in each.parts]
        hashes = [known for each in path[:-1] for known in each.keys]
        return Prefix([*ids, *node.ids(last + 1)], [*hashes, *node.keys[: last + 1]])

    def insert(self, salt: bytes, ids: TokenArray, hashes: Sequence[bytes]) -> None:
        """Cache a prompt with the verified hashes of its full blocks. Costs as much as its new blocks."""
        if len(ids) < self._min_tokens or not hashes:
            return
        table = self._tree.tables.get(salt, {})
        n_known = _count_known(table, hashes)
        path = _path_to(table[hashes[n_known - 1]]) if n_known else []
        if n_known < len(hashes):
            new = ids[n_known * self._block_tokens : len(hashes) * self._block_tokens].tobytes()
            if _NODE_BYTES + len(new) + _BLOCK_BYTES * (len(hashes) - n_known) > self._max_new_bytes:
                return
            n_last = n_known - path[-1].first_block if path else 0
            end = self._tree.open_end(path, n_last, salt)
            self._tree.append(end, hashes[n_known:], new)
        self._lru.touch(path, salt)
        self._tree.make_room([salt])


def _path_to(node: PromptNode | None) -> list[PromptNode]:
    """The nodes from the top of a tree down to this one."""
    path: list[PromptNode] = []
    while node is not None:
        path.append(node)
        node = node.parent
    return path[::-1]


def _count_known(table: dict[bytes, PromptNode], hashes: Sequence[bytes]) -> int:
    """How many leading blocks are cached."""
    if hashes[-1] in table:
        return len(hashes)
    return bisect.bisect_left(hashes, True, key=lambda block_hash: block_hash not in table)
