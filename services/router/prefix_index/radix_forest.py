"""The blocks of chains that holders have or will have, in a radix tree for each tenant. Pure.

A block's hash identifies all blocks before it (docs/block-hash.md), so a chain is found by its last known
block. Holders report blocks by their hashes alone. Blocks that no prompt has contained yet lie in detached
nodes, and move into the tree when a prompt contains them.

Memory is bounded for each tenant and in all; detached nodes count as one tenant's. Over the bound, the ends
of the least recently used chains are evicted. Blocks that no holder has are removed in bounded steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from libs.common import service_bounds
from services.router.prefix_index.block_node import BlockNode, ConfirmedBlocks, PredictedBlocks
from services.router.prefix_index.block_tree import NODE_COST_BLOCKS, BlockTree
from services.router.prefix_index.hash_table import (
    KEY_BYTES,
    count_common,
    count_common_backwards,
    pack_keys,
    reversed_keys,
)

_MAX_DETACHED_BLOCKS = 256  # of one detached node
# A detached node with less than 1 / _MIN_FILL of its blocks left passes them to a shared node.
_MIN_FILL = 8
# Blocks that a prediction cleans up, beyond twice those that it adds.
_CLEANED_BLOCKS = 64


@dataclass(slots=True)
class ChainPath:
    """The nodes of the first `n_blocks` blocks of a chain. Valid until the forest changes.

    `is_end`: the next block is unknown, in detached nodes too.
    """

    nodes: list[BlockNode] = field(default_factory=list)
    n_blocks: int = 0
    is_end: bool = False

    @property
    def last_keys(self) -> int:
        """The number of blocks of the last node that belong to the path."""
        return self.n_blocks - self.nodes[-1].first_block if self.nodes else 0


class RadixForest:
    """See the module's text. Not thread-safe."""

    def __init__(
        self,
        *,
        max_bytes: int = service_bounds.MAX_PREFIX_INDEX_BYTES,
        max_tenant_bytes: int = service_bounds.MAX_TENANT_PREFIX_INDEX_BYTES,
    ) -> None:
        self.tree = BlockTree(max_bytes=max_bytes, max_tenant_bytes=max_tenant_bytes)
        self.lru = self.tree.lru
        # Claims of departed holders that nodes still refer to.
        self._departed: deque[ConfirmedBlocks | PredictedBlocks] = deque()
        self._gathered: BlockNode | None = None  # the detached node for the remaining blocks of others
        # The last lookup: the hashes, their number then, the tree's version, the path.
        self._last: tuple[Sequence[bytes], int, int, ChainPath] = ((), 0, 0, ChainPath())

    # ---- chains

    def find(self, hashes: Sequence[bytes], *, tenant: str) -> ChainPath:
        """The known prefix of a chain, by log2(n) probes. Blocks of it in detached nodes join the tree."""
        path = self._known(hashes)
        n_known = path.n_blocks
        if not path.is_end:
            while n_known < len(hashes) and self.tree.find(hashes[n_known][:KEY_BYTES]) is not None:
                n_known += 1
        if n_known > path.n_blocks:
            self._extend(path, hashes[:n_known], tenant)
            self.lru.touch(path.nodes, tenant)
            self._last = (hashes, len(hashes), self.tree.version, path)
            self._make_room(path.nodes, tenant)
        else:
            self._last = (hashes, len(hashes), self.tree.version, path)
        return path

    def predict(
        self, claims: PredictedBlocks, hashes: Sequence[bytes], *, tenant: str, now_s: float, until_s: float
    ) -> None:
        """Record that the holder will have this chain. Costs as much as its nodes and its new blocks."""
        path = self._known(hashes)
        n_new = len(hashes) - path.n_blocks
        if n_new:
            self._extend(path, hashes, tenant)
        for node in path.nodes:
            n_blocks = min(node.n_keys, path.n_blocks - node.first_block)
            node.predict(claims, n_blocks, now_s=now_s, until_s=until_s)
            self.tree.predicted(node, until_s)
        self.lru.touch(path.nodes, tenant)
        self._last = (hashes, len(hashes), self.tree.version, path)
        self.clean_up(now_s, max_blocks=_CLEANED_BLOCKS + 2 * n_new)
        self._make_room(path.nodes, tenant)

    def _known(self, hashes: Sequence[bytes]) -> ChainPath:
        """The path of a chain. The last one is cached, as a request looks a chain up and then predicts it."""
        same, length, version, path = self._last
        if hashes is same and length == len(hashes) and version == self.tree.version:
            return path
        return self._look_up(hashes)

    def _look_up(self, hashes: Sequence[bytes]) -> ChainPath:
        low, high = 0, len(hashes)  # the first `low` blocks are known, none after the first `high` is
        last: BlockNode | None = None
        is_end = False
        probe = high
        while low < high:
            found = self.tree.find(hashes[probe - 1][:KEY_BYTES])
            if found is not None and found[1] == probe - 1 and found[0].tenant is not None:
                low, last = probe, found[0]
            else:
                high, is_end = probe - 1, found is None
            probe = (low + high + 1) // 2
        path = ChainPath([], low, is_end)
        while last is not None:
            path.nodes.append(last)
            last = last.parent
        path.nodes.reverse()
        return path

    def _extend(self, path: ChainPath, hashes: Sequence[bytes], tenant: str) -> None:
        """Add the blocks of `hashes` after the path to the tree and the path."""
        node = self.tree.open_end(path.nodes, path.last_keys, tenant)
        first = node.n_keys
        detached = self.tree.extend(node, pack_keys(hashes[path.n_blocks :]))
        self.tree.grew(node)
        if detached:
            self._adopt(node, first, detached)
        path.n_blocks = len(hashes)

    def _adopt(self, node: BlockNode, first: int, detached: Iterable[tuple[int, BlockNode, int]]) -> None:
        """Move the claims on blocks that were detached to their new node, where `first` is the first one."""
        pieces: list[tuple[BlockNode, int, int, int]] = []  # source, position there, position here, length
        for at, source, position in detached:
            if source.tenant is not None:
                continue  # a block whose key is that of another one: see hash_table.py
            if pieces:
                last, from_, to, length = pieces[-1]
                if last is source and position - from_ == length == first + at - to:
                    pieces[-1] = (last, from_, to, length + 1)
                    continue
            pieces.append((source, position, first + at, 1))
        for source, from_, to, length in pieces:
            mask = ((1 << length) - 1) << from_
            for claims, bits in list(source.confirmed.items()):
                if bits & mask:
                    source.set_confirmed(claims, bits & ~mask)
                    node.set_confirmed(claims, node.confirmed.get(claims, 0) | (bits & mask) >> from_ << to)
            source.blank(from_, length)
        for source in {source.number: source for source, *_ in pieces}.values():
            self.tree.reconcile(source)
            self._gather(source)
        self.lru.resize(node)

    def _gather(self, source: BlockNode) -> None:
        """Move the few blocks that are left of a detached node to a shared detached node."""
        left = 0
        for bits in source.confirmed.values():
            left |= bits
        n_left = left.bit_count()
        if not left or n_left * _MIN_FILL > source.n_keys or not self.tree.contains(source):
            return
        node = self._gathered
        if (
            node is None
            or node is source
            or not self.tree.contains(node)
            or node.n_keys + n_left > _MAX_DETACHED_BLOCKS
        ):
            node = self._gathered = self.tree.add(None)
        first, keys = node.n_keys, []
        while left:
            at = (left & -left).bit_length() - 1
            keys.append(source.keys[at * KEY_BYTES : (at + 1) * KEY_BYTES])
            left &= left - 1
        self._adopt(node, first, self.tree.extend(node, b"".join(keys)))

    # ---- reports of holders

    def stored(self, claims: ConfirmedBlocks, hashes: Sequence[bytes]) -> None:
        """Record that the holder has these. Blocks in the order of their chain cost little more than one."""
        pieces, unknown = self._pieces(hashes)
        for node, mask in pieces.items():
            node.set_confirmed(claims, node.confirmed.get(claims, 0) | mask)
            self.lru.resize(node)
        while unknown:
            node = claims.open_detached if claims.open_detached is not None else self.tree.add(None)
            if node.n_keys >= _MAX_DETACHED_BLOCKS or not self.tree.contains(node):
                node = self.tree.add(None)
            claims.open_detached, first = node, node.n_keys
            self.tree.extend(node, b"".join(unknown[: _MAX_DETACHED_BLOCKS - first]))
            del unknown[: _MAX_DETACHED_BLOCKS - first]
            node.set_confirmed(claims, node.confirmed.get(claims, 0) | (1 << node.n_keys) - (1 << first))
            self.lru.resize(node)
        self._make_room(pieces, None)

    def removed(self, claims: ConfirmedBlocks, hashes: Sequence[bytes]) -> None:
        """Record that the holder no longer has these."""
        pieces, _ = self._pieces(hashes)
        for node, mask in pieces.items():
            lost = node.confirmed.get(claims, 0) & mask
            node.set_confirmed(claims, node.confirmed.get(claims, 0) & ~lost)
            if node.tenant is None:
                self.tree.drop_unclaimed(node, lost)
        for node in pieces:
            if self.tree.contains(node):
                self.tree.reconcile(node)
                if node.tenant is None:
                    self._gather(node)

    def drop(self, claims: ConfirmedBlocks | PredictedBlocks) -> None:
        """Drop the claims of a departed holder, which no lookup uses any more; `clean_up` removes them."""
        self._departed.append(claims)

    def clean_up(self, now_s: float, *, max_blocks: int) -> bool:
        """Remove some of what expired or departed. Returns whether there may be more."""
        while left := self.tree.clean_up(now_s, max_blocks=max_blocks):
            node = self._drop_departed() if self._departed else None
            if node is None:
                return False
            self.tree.check_soon(node)
            max_blocks = left - NODE_COST_BLOCKS
        return True

    def _drop_departed(self) -> BlockNode | None:
        """Remove the claims of a departed holder from one node; returns the node."""
        while self._departed and not self._departed[0].nodes:
            self._departed.popleft()
        if not self._departed:
            return None
        claims = self._departed[0]
        node = claims.nodes.pop()
        if isinstance(claims, ConfirmedBlocks):
            node.set_confirmed(claims, 0)
        else:
            node.set_predicted(claims, ())
        self.lru.resize(node)
        return node

    def _make_room(self, grown: Iterable[BlockNode], tenant: str | None) -> None:
        self.tree.make_room(dict.fromkeys([*(node.tenant for node in grown), tenant]))

    def _pieces(self, hashes: Sequence[bytes]) -> tuple[dict[BlockNode, int], list[bytes]]:
        """The nodes of these blocks with bits for the blocks, and the keys of unknown blocks."""
        pieces: dict[BlockNode, int] = {}
        unknown: dict[bytes, None] = {}
        keys, at = pack_keys(hashes), 0
        backwards = b""  # blocks are evicted in reverse order
        while at < len(keys):
            key = keys[at : at + KEY_BYTES]
            found = self.tree.find(key)
            if found is None:
                unknown[key] = None
                at += KEY_BYTES
                continue
            node, first = found[0], found[1] - found[0].first_block
            length = count_common(keys, at, node.keys, first * KEY_BYTES)
            if length == 1 and first and at + KEY_BYTES < len(keys):
                backwards = backwards or reversed_keys(keys)
                end = (first + 1) * KEY_BYTES
                length = count_common_backwards(backwards, len(keys) - at, node.keys, end)
                first -= length - 1
            pieces[node] = pieces.get(node, 0) | ((1 << length) - 1) << first
            at += length * KEY_BYTES
        return pieces, list(unknown)
