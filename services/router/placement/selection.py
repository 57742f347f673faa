"""The candidates of one part of a request: which may be used, and which one is best. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence

import msgspec

from services.router.placement.explanation import (
    BY_COST,
    BY_DRAW,
    BY_HELD,
    BY_ROUND_ROBIN,
    ONLY_ONE,
    REQUESTED,
    choice_reason,
    holder_reason,
)
from services.router.placement.types import ChoiceReason, Group, PlacementRequest, WorkerCandidate

LOAD_BOUND = 1.25
# To a cold request, workers that cost at most this much more than the cheapest are equal.
COLD_BAND = 0.1
COLD_BAND_MS = 2.0


class Choice(msgspec.Struct, frozen=True, gc=False):
    """The best candidate, picked by a rule of explanation.py from the `n_alike` that cost at most `limit_ms`.
    `against`: the cheapest other one, with rule BY_COST."""

    candidate: WorkerCandidate
    rule: str
    n_alike: int = 1
    limit_ms: float = 0.0
    against: WorkerCandidate | None = None

    def reasons(self, candidates: Sequence[WorkerCandidate]) -> list[ChoiceReason]:
        """Why it is the best, and why another one of its group that holds more is not. `candidates`: all of
        its part."""
        chosen, against = self.candidate, self.against
        reasons = [choice_reason(chosen, self.rule, against, n_alike=self.n_alike, limit_ms=self.limit_ms)]
        most_tokens = max([other.held_tokens for other in candidates])
        if most_tokens > chosen.held_tokens and self.rule != REQUESTED:
            of_group = [other for other in candidates if other.group == chosen.group]
            holder = max(of_group, key=lambda other: other.held_tokens)
            if holder.held_tokens > chosen.held_tokens and holder is not against:
                reasons += holder_reason(chosen, holder)
        return reasons


def usable_by_group(candidates: Sequence[WorkerCandidate]) -> dict[Group, list[WorkerCandidate]]:
    """The candidates of each group that are not refused, groups in order."""
    usable = [candidate for candidate in candidates if not candidate.refused]
    if not usable:
        return {}
    group = usable[0].group
    if not [candidate for candidate in usable if candidate.group != group]:
        return {group: usable}
    groups = sorted({candidate.group for candidate in usable})
    return {group: [candidate for candidate in usable if candidate.group == group] for group in groups}


def bound_load(
    groups: Mapping[Group, list[WorkerCandidate]], incoming_tokens: int
) -> dict[Group, list[WorkerCandidate]]:
    """Refuse workers beyond the load bound of their group; its least loaded one stays usable."""
    bounded = {}
    for group, usable in groups.items():
        bounded[group] = usable
        if len(usable) > 1:
            fair = (sum([each.load_tokens for each in usable]) + incoming_tokens) / len(usable)
            most = LOAD_BOUND * fair
            beyond = [each for each in usable if each.load_tokens > most + each.held_tokens]
            if beyond:
                reason = f"tokens in flight, {fair:.0f} would be fair"
                for each in beyond:
                    each.refused = f"{each.load_tokens} {reason}"
                bounded[group] = [each for each in usable if not each.refused]
    return bounded


def choose(usable: Sequence[WorkerCandidate], request: PlacementRequest, *, cold: bool) -> Choice:
    """The best of some usable candidates. None is preferred more because its load grows."""
    if len(usable) == 1:
        is_requested = request.requested_prefill and usable[0].part == "prefill"
        return Choice(usable[0], REQUESTED if is_requested else ONLY_ONE)
    totals_ms = [candidate.total_ms for candidate in usable]
    limit_ms = min(totals_ms)
    if cold:
        limit_ms = limit_ms * (1 + COLD_BAND) + COLD_BAND_MS
    dearer_ms = [total_ms for total_ms in totals_ms if total_ms > limit_ms]
    if len(dearer_ms) == len(usable) - 1:
        chosen, against = (usable[totals_ms.index(min(each_ms))] for each_ms in (totals_ms, dearer_ms))
        return Choice(chosen, BY_COST, 1, limit_ms, against)
    alike = [candidate for candidate in usable if candidate.total_ms <= limit_ms]
    ranks = [candidate.last_cold if cold else -candidate.held_tokens for candidate in alike]
    first = min(ranks)
    best = [candidate for candidate, rank in zip(alike, ranks, strict=True) if rank == first]
    if len(best) == 1:
        return Choice(best[0], BY_ROUND_ROBIN if cold else BY_HELD, len(alike), limit_ms)
    return Choice(min(best, key=_draw(request.seed)), BY_DRAW, len(best), limit_ms)


def _draw(seed: int) -> Callable[[WorkerCandidate], bytes]:
    """A random order of instances by the seed. The order of two instances does not depend on the others."""
    key = (seed % (1 << 64)).to_bytes(8, "little")
    return lambda candidate: hashlib.blake2b(candidate.instance.encode(), key=key, digest_size=8).digest()
