"""Which layers each pipeline stage holds: balanced by bytes and by time. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class PartCost:
    """What the embedding, one layer or the head costs: memory, and time in any unit."""

    n_bytes: float
    time: float


def balance_stages(
    layers: Sequence[PartCost], n_stages: int, *, embedding: PartCost, head: PartCost
) -> tuple[range, ...]:
    """Consecutive layers for each stage, none empty; the first also has the embedding, the last the head.

    The cost of a stage is the larger of its share of the model's bytes and its share of the model's time. The
    largest cost of a stage is the least possible one.
    """
    if not 1 <= n_stages <= len(layers):
        raise ValueError(f"{len(layers)} layers cannot be cut in {n_stages} stages")
    cost = _stage_cost(layers, embedding, head)

    @cache
    def best(begin: int, stages: int) -> tuple[float, tuple[int, ...]]:
        """The largest cost, and the ends of the stages, of the layers from `begin`."""
        if stages == 1:
            return cost(begin, len(layers)), (len(layers),)
        found: tuple[float, tuple[int, ...]] = (float("inf"), ())
        for end in range(begin + 1, len(layers) - stages + 2):
            own = cost(begin, end)
            if own >= found[0]:
                break
            rest, ends = best(end, stages - 1)
            found = min(found, (max(own, rest), (end, *ends)), key=lambda candidate: candidate[0])
        return found

    ends = best(0, n_stages)[1]
    return tuple(range(begin, end) for begin, end in zip((0, *ends), ends, strict=False))


def _stage_cost(
    layers: Sequence[PartCost], embedding: PartCost, head: PartCost
) -> Callable[[int, int], float]:
    """The cost of a stage with the layers [begin, end)."""
    parts = [embedding, *layers, head]
    sums = [
        [0.0, *accumulate(part.n_bytes for part in parts)],
        [0.0, *accumulate(part.time for part in parts)],
    ]

    def cost(begin: int, end: int) -> float:
        first = 0 if begin == 0 else begin + 1
        last = end + 1 + (end == len(layers))
        return max((total[last] - total[first]) / (total[-1] or 1.0) for total in sums)

    return cost
