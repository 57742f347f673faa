"""A node of block keys, and which holders have which of its blocks. Pure.

Confirmed blocks, which a holder reported, are bits of an int. Predicted blocks, which a holder will have
after it has processed its prompts, are a number of leading blocks and an expiry time.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass, field
from typing import Self

from libs.common.radix.node import RadixNode
from services.router.prefix_index.hash_table import KEY_BYTES

# Approximate memory (`bench.cache.prefix_index`): a node's objects, a block's key with its record in the
# table, and a holder's share in a node.
NODE_BYTES = 1000
BLOCK_BYTES = 33
CLAIM_BYTES = 150
_EVICTED_TOGETHER = 256  # blocks
# Predictions of different lengths for one holder in a node. Beyond that the first one to expire is dropped.
_MAX_PREDICTIONS = 4

# (leading blocks, expiry time) with the most blocks first and the latest expiry last.
Predictions = tuple[tuple[int, float], ...]


@dataclass(eq=False, slots=True)
class ConfirmedBlocks:
    """The blocks that one holder reported for one tier: `n_blocks` in all, spread over `nodes`.

    `open_detached`: the detached node that takes the next block whose place in a chain is unknown.
    """

    nodes: set[BlockNode] = field(default_factory=set)
    n_blocks: int = 0
    open_detached: BlockNode | None = None


@dataclass(eq=False, slots=True)
class PredictedBlocks:
    """The blocks that one holder was sent: leading blocks of `nodes`."""

    nodes: set[BlockNode] = field(default_factory=set)


class BlockNode(RadixNode):
    """Consecutive blocks of a chain, the first of them block `first_block`. `keys` are those of HashTable.

    A detached node (`tenant` None) has blocks in any order that only holders reported, no parent and no
    children.
    """

    __slots__ = ("confirmed", "due_s", "first_block", "number", "predicted")

    keys: bytes

    def __init__(self, tenant: Hashable, number: int) -> None:
        super().__init__(tenant)
        self.number = number
        self.first_block = 0
        self.keys = b""
        self.confirmed: dict[ConfirmedBlocks, int] = {}
        self.predicted: dict[PredictedBlocks, Predictions] = {}
        self.due_s: float | None = None  # when it is checked again: see ExpiryQueue

    @property
    def n_keys(self) -> int:
        """The number of blocks."""
        return len(self.keys) // KEY_BYTES

    @property
    def child_key(self) -> Hashable:
        """The node itself: blocks are found through HashTable, not from parent to child."""
        return self

    @property
    def end(self) -> int:
        """The position in the chain of the block after the last."""
        return self.first_block + len(self.keys) // KEY_BYTES

    @property
    def claimed_blocks(self) -> int:
        """The number of blocks up to the last that any holder has or was sent."""
        confirmed = [bits.bit_length() for bits in self.confirmed.values()]
        predicted = [predictions[0][0] for predictions in self.predicted.values()]
        return max([*confirmed, *predicted], default=0)

    def unique_blocks(self, own: Collection[ConfirmedBlocks]) -> int:
        """How many blocks one of `own` reported and no other holder."""
        mine = others = 0
        for claims, bits in self.confirmed.items():
            if any(claims is each for each in own):
                mine |= bits
            else:
                others |= bits
        return (mine & ~others).bit_count()

    def size_bytes(self) -> int:
        claims = CLAIM_BYTES * (len(self.confirmed) + len(self.predicted))
        n_blocks = len(self.keys) // KEY_BYTES
        return NODE_BYTES + BLOCK_BYTES * n_blocks + claims + n_blocks * len(self.confirmed) // 7  # int bits

    def keys_after_eviction(self, excess_bytes: int) -> int:
        return max(self.n_keys - _EVICTED_TOGETHER, 0)

    # ---- claims of holders

    def set_confirmed(self, claims: ConfirmedBlocks, bits: int) -> None:
        """Record exactly which blocks of this node the holder has."""
        before = self.confirmed.get(claims, 0)
        claims.n_blocks += bits.bit_count() - before.bit_count()
        if bits:
            self.confirmed[claims] = bits
            claims.nodes.add(self)
        elif before:
            del self.confirmed[claims]
            claims.nodes.discard(self)

    def set_predicted(self, claims: PredictedBlocks, predictions: Predictions) -> None:
        """Record exactly which blocks of this node the holder will have."""
        if predictions:
            self.predicted[claims] = predictions
            claims.nodes.add(self)
        elif claims in self.predicted:
            del self.predicted[claims]
            claims.nodes.discard(self)

    def predict(self, claims: PredictedBlocks, n_blocks: int, *, now_s: float, until_s: float) -> None:
        """Add a prediction: the holder will have the first `n_blocks`."""
        before = self.predicted.get(claims)
        if before is None or (before[0][0] <= n_blocks and before[-1][1] <= until_s):
            self.predicted[claims] = ((n_blocks, until_s),)
            claims.nodes.add(self)
        else:
            valid = [each for each in before if each[1] > now_s]
            self.set_predicted(claims, _longest_first([*valid, (n_blocks, until_s)]))

    def expire_predictions(self, now_s: float) -> None:
        """Drop the predictions whose time is over."""
        for claims, predictions in list(self.predicted.items()):
            if predictions[0][1] <= now_s:  # the first of them to expire
                self.set_predicted(claims, tuple([each for each in predictions if each[1] > now_s]))

    def drop_claims(self) -> None:
        """Remove this node from its holders' claims, before its removal from the tree."""
        for confirmed, bits in self.confirmed.items():
            confirmed.n_blocks -= bits.bit_count()
            confirmed.nodes.discard(self)
        for predicted in self.predicted:
            predicted.nodes.discard(self)

    def blank(self, first: int, n_blocks: int) -> None:
        """Overwrite keys of a detached node whose blocks have left it."""
        begin, end = first * KEY_BYTES, (first + n_blocks) * KEY_BYTES
        self.keys = self.keys[:begin] + bytes(end - begin) + self.keys[end:]

    # ---- split, merge, truncate

    def truncate(self, n_keys: int) -> None:
        self.keys = self.keys[: n_keys * KEY_BYTES]
        for claims, bits in list(self.confirmed.items()):
            self.set_confirmed(claims, bits & (1 << n_keys) - 1)
        self._limit_predictions(n_keys)

    def move_head(self, head: Self, n_keys: int) -> None:
        head.first_block, self.first_block = self.first_block, self.first_block + n_keys
        head.keys, self.keys = self.keys[: n_keys * KEY_BYTES], self.keys[n_keys * KEY_BYTES :]
        for confirmed, bits in list(self.confirmed.items()):
            self.set_confirmed(confirmed, bits >> n_keys)
            head.set_confirmed(confirmed, bits & (1 << n_keys) - 1)
        for predicted, predictions in list(self.predicted.items()):
            beyond = [(n - n_keys, until_s) for n, until_s in predictions if n > n_keys]
            self.set_predicted(predicted, tuple(beyond))
            head.set_predicted(predicted, predictions)
        head._limit_predictions(n_keys)

    def absorb(self, child: Self) -> None:
        before = self.n_keys
        self.keys += child.keys
        for confirmed, bits in list(child.confirmed.items()):
            child.set_confirmed(confirmed, 0)
            self.set_confirmed(confirmed, self.confirmed.get(confirmed, 0) | bits << before)
        for predicted, predictions in list(child.predicted.items()):
            child.set_predicted(predicted, ())
            # A holder that was sent the child's blocks was sent all blocks before them, for as long.
            longer = [(before + n, until_s) for n, until_s in predictions]
            self.set_predicted(predicted, _longest_first([*longer, *self.predicted.get(predicted, ())]))

    def _limit_predictions(self, n_blocks: int) -> None:
        for claims, predictions in list(self.predicted.items()):
            limited = [(min(n, n_blocks), until_s) for n, until_s in predictions]
            self.set_predicted(claims, _longest_first(limited))


def leading_ones(bits: int) -> int:
    """The number of set bits below the lowest bit that is not set."""
    return (~bits & bits + 1).bit_length() - 1


def _longest_first(predictions: list[tuple[int, float]]) -> Predictions:
    """The predictions that no other one exceeds in both blocks and time."""
    kept: list[tuple[int, float]] = []
    for n_blocks, until_s in sorted(set(predictions), key=lambda each: (-each[0], -each[1])):
        if not kept or until_s > kept[-1][1]:
            kept.append((n_blocks, until_s))
    return tuple(kept[-_MAX_PREDICTIONS:])
