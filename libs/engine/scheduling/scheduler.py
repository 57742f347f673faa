"""Choose what one step computes: decode rows, then drafts, then prefill chunks, within a token budget. Pure.

A decoding sequence must not wait for a long prompt, so each gets its row in every step. Beyond `max_batch`
sequences, those that waited longest go first. Drafts leave a quarter of the remaining rows to prefills.
Prefills share these rows, and those that no draft takes. Tenants take turns by tokens (prefill_shares.py). Of
a tenant's prompts the one that needs least goes first, and of all the oldest overdue one gets a quarter
(libs/common/prefill_order.py). A prefill that waits for blocks of another one gives its rows to that one
(libs/engine/scheduling/prefix_sharing.py).

Attention of a prompt's rows expands the latents of its whole prefix again in every step. So a long prompt
that is alone gets steps of more rows (`Limits.long_step_tokens`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from libs.common.prefill_order import OVERDUE_SHARE, is_overdue, order_key
from libs.engine.scheduling.prefix_sharing import Following

LONG_PREFIX_STEPS = 8  # a prompt is long when so many usual steps of it have been computed
DRAFTS_LEAVE = 4  # while prompts wait, drafts leave them 1 / 4 of the rows that decoding leaves


@dataclass(frozen=True, slots=True)
class StepCandidate:
    """A sequence that could be part of the step."""

    seq_id: str
    arrival: int  # order of start
    last_slice: int  # the number of its last slice, counted over all sequences; 0 = none yet
    pending_tokens: int  # known tokens without KV; 1 while decoding
    decoding: bool
    n_drafts: int = 0
    computed_tokens: int = 0  # tokens with KV
    waited_tokens: int = 0  # of a prefill: tokens computed for other prompts since it started
    tenant_tag: float = 0.0  # of a prefill: prompts of the tenant with the lowest one go first
    # Set for a prefill that waits: its leader, a candidate that follows no other, gets the rows.
    following: Following | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """`step_tokens`: rows of one forward; at least `max_batch`, so that all decode rows fit.

    `long_step_tokens`: those of a forward that computes a long prompt alone, if more.
    """

    step_tokens: int
    max_batch: int
    long_step_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Slice:
    """The part of one sequence that a step computes: `n_tokens` known ones, then `n_drafts` guesses."""

    seq_id: str
    n_tokens: int
    n_drafts: int = 0


def schedule(candidates: Sequence[StepCandidate], limits: Limits) -> list[Slice]:
    """Slices of one step; at most as many rows as `limits` allow, and `max_batch` sequences."""
    decoding = sorted((c for c in candidates if c.decoding), key=lambda c: (c.last_slice, c.arrival))
    prefilling = [c for c in candidates if not c.decoding]
    kept_place = 1 if prefilling and limits.max_batch > 1 else 0  # so that a full batch admits a prefill
    decoding = decoding[: limits.max_batch - kept_place]
    spare, places = _rows_of_step(candidates, limits) - len(decoding), limits.max_batch - len(decoding)
    kept_rows = _kept_from_drafts(prefilling, spare) if places else 0
    slices: list[Slice] = []
    for candidate in decoding:
        n_drafts = min(candidate.n_drafts, spare - kept_rows)
        spare -= n_drafts
        slices.append(Slice(candidate.seq_id, 1, n_drafts))
    return slices + _share(prefilling, spare, places)


def _rows_of_step(candidates: Sequence[StepCandidate], limits: Limits) -> int:
    if len(candidates) == 1 and candidates[0].computed_tokens >= LONG_PREFIX_STEPS * limits.step_tokens:
        return max(limits.step_tokens, limits.long_step_tokens)
    return limits.step_tokens


def _kept_from_drafts(prefilling: Sequence[StepCandidate], spare: int) -> int:
    """The rows that drafts leave to prompts."""
    needed = sum(c.pending_tokens for c in prefilling if c.following is None)
    return min(needed, -(-spare // DRAFTS_LEAVE))


def _share(prefilling: Sequence[StepCandidate], budget: int, places: int) -> list[Slice]:
    """Share the rows in order. A follower's rows go to its leader, as many as it waits for."""
    if not prefilling or budget < 1 or places < 1:
        return []
    by_id = {c.seq_id: c for c in prefilling}
    granted: dict[str, int] = {}
    spare = budget

    def grant(candidate: StepCandidate, at_most: int) -> None:
        nonlocal spare
        leader, wanted = candidate.seq_id, candidate.pending_tokens
        if candidate.following is not None:
            leader = candidate.following.leader
            wanted = min(candidate.following.n_tokens, by_id[leader].pending_tokens)
        if leader not in granted and len(granted) == places:
            return
        more = min(wanted - granted.get(leader, 0), at_most, spare)
        if more > 0:
            granted[leader] = granted.get(leader, 0) + more
            spare -= more

    overdue = [c for c in prefilling if is_overdue(c.waited_tokens, c.pending_tokens)]
    if overdue:
        grant(min(overdue, key=lambda c: c.arrival), max(1, budget // OVERDUE_SHARE))
    for candidate in sorted(prefilling, key=lambda c: (c.tenant_tag, order_key(c.pending_tokens, c.arrival))):
        grant(candidate, spare)
    return [Slice(c.seq_id, granted[c.seq_id]) for c in prefilling if granted.get(c.seq_id)]
