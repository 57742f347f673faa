"""The candidates of one part of a request: which may be used, and which one is best. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.router.placement.explanation import (
    BY_COST,
    BY_DRAW,
    BY_HELD,
    BY_TURN,
    ONLY_ONE,
    PINNED,
    choice_reason,
    holder_reason,
)
from services.router.placement.fleet_arrays import Group, Rows
from services.router.placement.pricing import CandidatePrices
from services.router.placement.types import ChoiceReason, PlacementRequest, WorkerCandidate

LOAD_BOUND = 1.25
# To a cold request, workers that cost at most this much more than the cheapest are equal.
COLD_BAND = 0.1
COLD_BAND_MS = 2.0

# The rows that a rule of placement allows, and its text for a row that it refuses.
_Rule = tuple[NDArray[np.bool_], Callable[[int], str]]


@dataclass(slots=True)
class Choice:
    """The chosen candidate, and why."""

    candidate: WorkerCandidate
    reasons: list[ChoiceReason]


class CandidateSet:
    """The candidates of one part. Rules narrow `usable`, by group; `choose` picks the best of some rows."""

    def __init__(self, request: PlacementRequest, prices: CandidatePrices, failed: Set[str]) -> None:
        self._request, self._prices, self._failed = request, prices, failed
        self._rules: list[_Rule] = []
        self._only_rule = ONLY_ONE  # why a worker without a usable alternative is chosen
        self.usable: Mapping[Group, Rows] = prices.rows.usable(request.fingerprint, failed)

    def with_prices(self, prices: CandidatePrices) -> CandidateSet:
        """The same workers under the same rules, for another part."""
        other = CandidateSet(self._request, prices, self._failed)
        other._rules, other.usable = self._rules.copy(), self.usable
        return other

    def bound_load(self) -> None:
        """Refuse workers beyond the load bound of their group; its least loaded one stays usable."""
        load_tokens = self._prices.load_tokens
        fair = np.zeros(len(load_tokens))
        for rows in self.usable.values():
            fair[rows] = (np.add.reduce(load_tokens[rows]) + self._request.prompt_tokens) / len(rows)
        self._narrow(
            load_tokens <= LOAD_BOUND * fair + self._prices.held_tokens,
            lambda row: f"{load_tokens[row]:.0f} tokens in flight, {fair[row]:.0f} would be fair",
        )

    def keep_only(self, instance: str) -> None:
        """Refuse all workers but one."""
        allowed = np.zeros(len(self._prices.load_tokens), dtype=np.bool_)
        row = self._prices.rows.row_of.get(instance)
        if row is not None:
            allowed[row] = True
        self._narrow(allowed, lambda row: "another worker is pinned")
        self._only_rule = PINNED

    def bound_computation(self, most_tokens: int) -> None:
        """Refuse workers that would have to compute more than so many tokens of the prompt."""
        uncached_tokens = self._request.prompt_tokens - self._prices.cached_tokens
        self._narrow(
            uncached_tokens <= most_tokens,
            lambda row: f"{uncached_tokens[row]:.0f} tokens to compute are too many between steps",
        )

    def _narrow(self, allowed: NDArray[np.bool_], text: Callable[[int], str]) -> None:
        self._rules.append((allowed, text))
        kept = {group: rows[allowed[rows]] for group, rows in self.usable.items()}
        self.usable = {group: rows for group, rows in kept.items() if len(rows)}

    def is_cached_beyond(self, tokens: float) -> bool:
        """Whether a usable worker holds or can load more than so many tokens of the prompt."""
        cached_tokens = self._prices.cached_tokens
        return any([cached_tokens[rows].max() > tokens for rows in self.usable.values()])

    def refusal(self, row: int) -> str:
        """The reason why a row may not be used; "" = it may."""
        refused = self._prices.rows.refusal(row, self._request.fingerprint, self._failed)
        if refused:
            return refused
        return next((text(row) for allowed, text in self._rules if not allowed[row]), "")

    def refusals(self) -> list[str]:
        """The different reasons of all rows that may not be used."""
        rows = range(len(self._prices.rows.instances))
        return sorted({reason for reason in map(self.refusal, rows) if reason})

    def candidate(self, row: int) -> WorkerCandidate:
        """One row with its cost, and with the reason if it is refused."""
        return self._prices.candidate(row, self.refusal(row))

    def candidates(self) -> list[WorkerCandidate]:
        """All rows, in the order of the fleet."""
        return [self.candidate(row) for row in range(len(self._prices.rows.instances))]

    def choose_by_group(self, *, cold: bool) -> dict[Group, Choice]:
        """The best usable candidate of each group."""
        group_rows = self._prices.rows.group_rows
        return {group: self.choose(rows, group_rows[group], cold=cold) for group, rows in self.usable.items()}

    def choose_of_all(self) -> Choice:
        """The best usable candidate of all groups; there is one."""
        rows = np.sort(np.concatenate(list(self.usable.values())))
        return self.choose(rows, np.arange(len(self._prices.rows.instances)), cold=False)

    def choose(self, rows: Rows, holders: Rows, *, cold: bool) -> Choice:
        """The best of some usable rows. A reason is given as well for the one of `holders` that holds most.

        No worker is preferred more because its load grows.
        """
        prices = self._prices
        row, rule, n_alike, limit_ms = self._best(rows, cold=cold)
        chosen, against = prices.candidate(row, ""), None
        if rule == BY_COST:
            others = rows[rows != row]
            against = prices.candidate(int(others[prices.total_ms[others].argmin()]), "")
        reasons = [choice_reason(chosen, rule, against=against, n_alike=n_alike, limit_ms=limit_ms)]
        holder_row = int(holders[prices.held_tokens[holders].argmax()])
        if rule != PINNED and prices.held_tokens[holder_row] > chosen.held_tokens:
            holder = self.candidate(holder_row)
            if against is None or holder.instance != against.instance:
                reasons += holder_reason(chosen, holder)
        return Choice(chosen, reasons)

    def _best(self, rows: Rows, *, cold: bool) -> tuple[int, str, int, float]:
        """(the best row, the rule that picked it, from how many rows, which cost at most how much)."""
        if len(rows) == 1:
            return int(rows[0]), self._only_rule, 1, 0.0
        total_ms = self._prices.total_ms[rows]
        limit_ms = float(total_ms[total_ms.argmin()])
        if cold:
            limit_ms = limit_ms * (1 + COLD_BAND) + COLD_BAND_MS
        alike: Sequence[int] = rows[total_ms <= limit_ms].tolist()
        if len(alike) == 1:
            return alike[0], BY_COST, 1, limit_ms
        ranks = self._prices.cold_turns if cold else -self._prices.held_tokens
        first = min([ranks[row] for row in alike])
        best = [row for row in alike if ranks[row] == first]
        if len(best) == 1:
            return best[0], BY_TURN if cold else BY_HELD, len(alike), limit_ms
        draw = _draw(self._request.seed)
        row = min(best, key=lambda row: draw(self._prices.rows.instances[row]))
        return row, BY_DRAW, len(best), limit_ms


def _draw(seed: int) -> Callable[[str], bytes]:
    """A random order of instances by the seed. The order of two instances does not depend on the others."""
    key = (seed % (1 << 64)).to_bytes(8, "little")
    return lambda instance: hashlib.blake2b(instance.encode(), key=key, digest_size=8).digest()
