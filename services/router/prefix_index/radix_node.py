"""A run of blocks, and who has which of them. Pure.

A run is a piece of a chain that nothing branches off inside of. Of a holder it is known, by the bits of an
int, which of the blocks it said it has, and of a holder that was sent a prompt, how many of the first blocks
it is about to have and until when that is believed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from services.router.prefix_index.hash_table import KEY_BYTES

# What a run costs, about (`bench.cache.prefix_index`): the objects around it, a block's key and its
# record in the table, and those who have some of it.
RUN_BYTES = 1000
BLOCK_BYTES = 33
CLAIM_BYTES = 150
# Promises of different lengths to one holder. Beyond that the one that is over first is forgotten.
_MOST_PROMISES = 4

# (blocks, until when), the most blocks first and those until a later time after them.
Promised = tuple[tuple[int, float], ...]


@dataclass(eq=False, slots=True)
class ConfirmedBlocks:
    """What one holder said that it has in one tier: `n_blocks`, all of them in `runs`. `loose`: where those
    of which nobody knows what is before them come next."""

    runs: set[RadixNode] = field(default_factory=set)
    n_blocks: int = 0
    loose: RadixNode | None = None


@dataclass(eq=False, slots=True)
class PredictedBlocks:
    """What one holder was sent: blocks of `runs`."""

    runs: set[RadixNode] = field(default_factory=set)


class RadixNode:
    """`keys`: of its blocks (`block_table`), of which the first is `first_block` of its chain. `tenant`: None
    for blocks in any order of which only their holders told: they have neither parent nor children."""

    __slots__ = (
        "children",
        "due_s",
        "first_block",
        "keys",
        "n_bytes",
        "number",
        "parent",
        "sent",
        "tenant",
        "told",
    )

    def __init__(
        self, number: int, *, tenant: str | None, parent: RadixNode | None, first_block: int
    ) -> None:
        self.number = number
        self.tenant = tenant
        self.parent = parent
        self.children: dict[int, RadixNode] = {}  # by number
        self.first_block = first_block
        self.keys = b""
        self.told: dict[ConfirmedBlocks, int] = {}
        self.sent: dict[PredictedBlocks, Promised] = {}
        self.due_s: float | None = None  # when it is looked at again (block_due.py)
        self.n_bytes = 0

    @property
    def n_blocks(self) -> int:
        """Its length."""
        return len(self.keys) // KEY_BYTES

    @property
    def end(self) -> int:
        """The number in its chain of the block after it."""
        return self.first_block + len(self.keys) // KEY_BYTES

    @property
    def wanted_blocks(self) -> int:
        """Blocks up to the last that anybody has or was sent."""
        told = [bits.bit_length() for bits in self.told.values()]
        return max([*told, *[promised[0][0] for promised in self.sent.values()]], default=0)

    def size(self) -> int:
        """Bytes that it takes, about."""
        claims = CLAIM_BYTES * (len(self.told) + len(self.sent))
        n_blocks = len(self.keys) // KEY_BYTES
        return RUN_BYTES + BLOCK_BYTES * n_blocks + claims + n_blocks * len(self.told) // 7  # bits of an int

    # ---- claims

    def set_told(self, told: ConfirmedBlocks, bits: int) -> None:
        """The holder says that of this run it has just these."""
        before = self.told.get(told, 0)
        told.n_blocks += bits.bit_count() - before.bit_count()
        if bits:
            self.told[told] = bits
            told.runs.add(self)
        elif before:
            del self.told[told]
            told.runs.discard(self)

    def set_sent(self, sent: PredictedBlocks, promised: Promised) -> None:
        """The holder is about to have just these."""
        if promised:
            self.sent[sent] = promised
            sent.runs.add(self)
        elif sent in self.sent:
            del self.sent[sent]
            sent.runs.discard(self)

    def promise(self, sent: PredictedBlocks, n_blocks: int, *, now_s: float, until_s: float) -> None:
        """The holder is about to have the first `n_blocks` too."""
        before = self.sent.get(sent)
        if before is None or (before[0][0] <= n_blocks and before[-1][1] <= until_s):
            self.sent[sent] = ((n_blocks, until_s),)
            sent.runs.add(self)
        else:
            live = [each for each in before if each[1] > now_s]
            self.set_sent(sent, _longest_first([*live, (n_blocks, until_s)]))

    def forget_promises(self, now_s: float) -> None:
        """Of those that are over."""
        for sent, promised in list(self.sent.items()):
            if promised[0][1] <= now_s:  # the first one of them to be over
                self.set_sent(sent, tuple([each for each in promised if each[1] > now_s]))

    def blank(self, first: int, n_blocks: int) -> None:
        """Blocks of a loose run are not here any more."""
        begin, end = first * KEY_BYTES, (first + n_blocks) * KEY_BYTES
        self.keys = self.keys[:begin] + bytes(end - begin) + self.keys[end:]

    def keep_begin(self, n_blocks: int) -> None:
        """Nothing is known any more of what is after the first `n_blocks`."""
        self.keys = self.keys[: n_blocks * KEY_BYTES]
        for told, bits in list(self.told.items()):
            self.set_told(told, bits & (1 << n_blocks) - 1)
        for sent, promised in list(self.sent.items()):
            self.set_sent(sent, _longest_first([(min(n, n_blocks), until_s) for n, until_s in promised]))

    def forget_all(self) -> None:
        """Nobody has any of it, as far as the holders' own books go."""
        for told, bits in self.told.items():
            told.n_blocks -= bits.bit_count()
            told.runs.discard(self)
        for sent in self.sent:
            sent.runs.discard(self)

    # ---- in two, and in one

    def give_end(self, end: RadixNode, n_blocks: int) -> None:
        """All after the first `n_blocks` becomes `end`, a new run."""
        end.keys, self.keys = self.keys[n_blocks * KEY_BYTES :], self.keys[: n_blocks * KEY_BYTES]
        end.first_block = self.first_block + n_blocks
        for told, bits in list(self.told.items()):
            told.n_blocks -= (bits >> n_blocks).bit_count()
            self.told[told] = bits & (1 << n_blocks) - 1
            end.set_told(told, bits >> n_blocks)
            if not self.told[told]:
                del self.told[told]
                told.runs.discard(self)
        for sent, promised in list(self.sent.items()):
            beyond = [(n - n_blocks, until_s) for n, until_s in promised if n > n_blocks]
            end.set_sent(sent, tuple(beyond))
            self.sent[sent] = _longest_first([(min(n, n_blocks), until_s) for n, until_s in promised])

    def take_end(self, end: RadixNode) -> None:
        """What follows it, a whole run, becomes its end. Nothing is told of `end` any more."""
        before = self.n_blocks
        self.keys += end.keys
        for told, bits in list(end.told.items()):
            end.set_told(told, 0)
            self.set_told(told, self.told.get(told, 0) | bits << before)
        for sent, promised in list(end.sent.items()):
            end.set_sent(sent, ())
            # Who was sent the end was sent all before it, for as long.
            longer = [(before + n, until_s) for n, until_s in promised]
            self.set_sent(sent, _longest_first([*longer, *self.sent.get(sent, ())]))


def leading_ones(bits: int) -> int:
    """How many of the lowest bits are set before the first that is not."""
    return (~bits & bits + 1).bit_length() - 1


def _longest_first(promises: list[tuple[int, float]]) -> Promised:
    """Without those that another one outlives and outreaches."""
    kept: list[tuple[int, float]] = []
    for n_blocks, until_s in sorted(set(promises), key=lambda each: (-each[0], -each[1])):
        if not kept or until_s > kept[-1][1]:
            kept.append((n_blocks, until_s))
    return tuple(kept[-_MOST_PROMISES:])
