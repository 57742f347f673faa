"""Cards that a plan can name, and the form `8xh100-80` in which it names them.

Memory is what a process sees (nvidia-smi), not the data sheet's. Bandwidth and FLOP/s are what a copy and a
bf16 matrix product on random data reach. Where no measured value is known, they are 0.9 and 0.8 of the data
sheet.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from slipstream.errors import InvalidArgument

GIB = 2**30
_MIB = 2**20
MAX_CARDS = 64
# Of the boards of all of these cards (NVIDIA HGX). Cards beyond are those of further nodes.
NODE_CARDS = 8
_FORM = re.compile(r"([0-9]{1,9})x([a-z0-9]+(?:-[0-9]+)?)")


@dataclass(frozen=True, slots=True)
class Card:
    """One kind of card. Links count one direction.

    link_bytes_per_s     to the other cards of its node
    network_bytes_per_s  of its adapter to other nodes: one a card (NVIDIA DGX), 400 Gb/s, with A100 200 Gb/s
    """

    name: str
    visible_bytes: int
    copy_bytes_per_s: float
    bf16_flops: float
    link_bytes_per_s: float
    network_bytes_per_s: float


_CARDS = (
    Card("h200-141", 143_771 * _MIB, 4.3e12, 7.9e14, 4.5e11, 4.5e10),
    Card("h100-80", 81_559 * _MIB, 3.0e12, 7.9e14, 4.5e11, 4.5e10),
    Card("a100-80", 81_920 * _MIB, 1.83e12, 2.5e14, 3.0e11, 2.25e10),
    Card("b200-180", 183_359 * _MIB, 7.2e12, 1.8e15, 9.0e11, 4.5e10),
)


def parse_cards(text: str) -> tuple[int, Card]:
    """`8xh100-80` or `8xh100` as number and kind. Raises InvalidArgument for `--gpus`."""
    match = _FORM.fullmatch(text.strip().lower())
    names = ", ".join(card.name for card in _CARDS)
    if match is None:
        raise InvalidArgument("--gpus", f"must be NUMBERxCARD, such as 8xh100-80, not {text!r}"[:200])
    count, name = int(match[1]), match[2]
    found = [card for card in _CARDS if name in (card.name, card.name.partition("-")[0])]
    if not found:
        raise InvalidArgument("--gpus", f"the card {name!r} is not known; known: {names}")
    if not 1 <= count <= MAX_CARDS:
        raise InvalidArgument("--gpus", f"the number of cards must be 1 to {MAX_CARDS}, not {count}")
    return count, found[0]
