"""The cost of each way to run a part of a request, for all workers at once. Pure; policy.py compares them.

`tests/router/placement/reference.py` is the same for one worker at a time; the order of each sum here is the
order there, so that both give the same numbers to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from services.router.placement.fleet_arrays import (
    Column,
    DecodeArrays,
    FleetArrays,
    HeldColumns,
    PrefillArrays,
    WorkerRows,
)
from services.router.placement.kv_source import KvReads, best_lenders, find_reads
from services.router.placement.prefill_queue import QueueDelay, queue_delay
from services.router.placement.types import Cost, PlacementRequest, WorkerCandidate

# A millisecond of a decode step weighs as much as this many milliseconds before the first token.
STEP_WEIGHT_TOKENS = 16


@dataclass(slots=True)
class CandidatePrices:
    """The candidates of one part as columns. They stay valid when the fleet's arrays change."""

    rows: WorkerRows
    total_ms: Column
    held_tokens: Column
    load_tokens: Column
    cached_tokens: Column  # held or loaded
    candidate: Callable[[int, str], WorkerCandidate]  # of a row, with the reason why it is refused
    cold_turns: Sequence[int] = ()  # of prefill candidates


def price_prefill(request: PlacementRequest, fleet: FleetArrays, tokens: HeldColumns) -> CandidatePrices:
    """The prompt on each prefill worker, with KV from its own pages and from the best source for it."""
    prefill, rates, prompt_tokens = fleet.prefill, fleet.prefill.rates, request.prompt_tokens
    held = np.minimum(tokens.prefill_expected, prompt_tokens - 1)
    # Predicted KV may come late, and computing it again costs far more than a read.
    confirmed = np.minimum(held, tokens.prefill_confirmed)
    lendable = tokens.prefill_lendable
    usable = prefill.usable(request.fingerprint, request.failed_prefill)
    lenders = best_lenders(prefill, usable, lendable)
    peers = {group: (prefill.instances[row], int(lendable[row])) for group, row in lenders.items()}
    reads = find_reads(request, prefill, rates, confirmed, stores=fleet.stores, peers=peers)
    cached = held if reads is None else np.maximum(held, confirmed + reads.loaded_tokens)
    uncached = prompt_tokens - cached
    delay = queue_delay(prefill, uncached, prompt_tokens)
    queue_ms = (
        rates.request_ms * delay.ahead_requests
        + rates.token_ms * delay.ahead_tokens
        + rates.longer_token_ms * delay.longer_tokens
    )
    prefill_ms = rates.compute_ms(uncached, prompt_tokens)
    others_ms = (rates.request_ms + rates.token_ms * uncached) * delay.delays
    total_ms = queue_ms + prefill_ms
    if reads is not None:
        held = cached - reads.loaded_tokens
        total_ms = total_ms + reads.load_ms
    total_ms = total_ms + others_ms
    turns = prefill.cold_turns.copy()
    build = _PrefillCandidates(prefill, turns, queue_ms, prefill_ms, others_ms, held, uncached, delay, reads)
    return CandidatePrices(prefill, total_ms, held, delay.load_tokens, cached, build, turns)


@dataclass(slots=True)
class _PrefillCandidates:
    rows: PrefillArrays
    cold_turns: list[int]
    queue_ms: Column
    prefill_ms: Column
    others_ms: Column
    held_tokens: Column
    uncached_tokens: Column
    delay: QueueDelay
    reads: KvReads | None

    def __call__(self, row: int, refused: str) -> WorkerCandidate:
        delay, reads = self.delay, self.reads
        source, from_peer = reads.source_of(row) if reads is not None else ("", False)
        return WorkerCandidate(
            part="prefill",
            instance=self.rows.instances[row],
            cost=Cost(
                queue_ms=self.queue_ms.item(row),
                prefill_ms=self.prefill_ms.item(row),
                load_ms=reads.load_ms.item(row) if reads is not None else 0.0,
                others_ms=self.others_ms.item(row),
            ),
            held_tokens=int(self.held_tokens.item(row)),
            source=source,
            from_peer=from_peer,
            loaded_tokens=int(reads.loaded_tokens.item(row)) if reads is not None else 0,
            ahead_tokens=int(delay.ahead_tokens.item(row)),
            ahead_requests=int(delay.ahead_requests.item(row)),
            longer_tokens=int(delay.longer_tokens.item(row)),
            uncached_tokens=int(self.uncached_tokens.item(row)),
            load_tokens=int(delay.load_tokens.item(row)),
            group=self.rows.groups[row],
            cold_turn=self.cold_turns[row],
            refused=refused,
        )


def price_decode(request: PlacementRequest, decode: DecodeArrays, tokens: HeldColumns) -> CandidatePrices:
    """The sequence on each decode worker, which pulls the prompt's KV from the prefill worker."""
    prompt_tokens, output_tokens = request.prompt_tokens, request.output_tokens
    block_tokens, context_tokens, sequences = decode.block_tokens, decode.context_tokens, decode.sequences
    held = np.minimum(tokens.decode_expected, prompt_tokens)
    n_bytes = np.ceil((prompt_tokens - held) / block_tokens) * decode.block_bytes
    transfer_ms = decode.pull_ms + decode.pull_mib_ms * n_bytes / (1 << 20)
    # The batch turns over once in the time of a whole answer, its pages as its places.
    step_ms = decode.step_base_ms + decode.sequence_ms * sequences + decode.context_ms * context_tokens * 1e-3
    turnover_ms = output_tokens * step_ms
    needed_blocks = np.ceil((prompt_tokens + output_tokens) / block_tokens)
    missing_tokens = np.maximum(needed_blocks - decode.free_blocks, 0.0) * block_tokens
    pages_ms = turnover_ms * missing_tokens / np.where(context_tokens > 0, context_tokens, np.inf)
    ahead_sequences = np.maximum(sequences - decode.max_sequences + 1, 0.0)
    wait_ms = np.maximum(pages_ms, turnover_ms * ahead_sequences / decode.max_sequences)
    after_tokens = context_tokens + (prompt_tokens + output_tokens // 2)
    after_ms = (
        decode.step_base_ms + decode.sequence_ms * (sequences + 1) + decode.context_ms * after_tokens * 1e-3
    )
    own_ms = STEP_WEIGHT_TOKENS * after_ms
    others_ms = STEP_WEIGHT_TOKENS * sequences * (after_ms - step_ms)
    total_ms = transfer_ms + wait_ms + own_ms + others_ms
    build = _DecodeCandidates(decode, transfer_ms, wait_ms, own_ms, others_ms, held, context_tokens)
    return CandidatePrices(decode, total_ms, held, context_tokens, held, build)


@dataclass(slots=True)
class _DecodeCandidates:
    rows: DecodeArrays
    transfer_ms: Column
    wait_ms: Column
    step_ms: Column
    others_ms: Column
    held_tokens: Column
    load_tokens: Column

    def __call__(self, row: int, refused: str) -> WorkerCandidate:
        return WorkerCandidate(
            part="decode",
            instance=self.rows.instances[row],
            cost=Cost(
                transfer_ms=self.transfer_ms.item(row),
                decode_queue_ms=self.wait_ms.item(row),
                step_ms=self.step_ms.item(row),
                others_ms=self.others_ms.item(row),
            ),
            held_tokens=int(self.held_tokens.item(row)),
            load_tokens=int(self.load_tokens.item(row)),
            group=self.rows.groups[row],
            refused=refused,
        )


class LocalPricer:
    """Prompt and sequence on each decode worker alone: priced when a worker may run it or a client asks."""

    def __init__(self, request: PlacementRequest, fleet: FleetArrays, prices: CandidatePrices) -> None:
        """`prices`: those of `price_decode`."""
        assert isinstance(prices.candidate, _DecodeCandidates)
        self._request, self._stores, self._decode = request, fleet.stores, fleet.decode
        self._prices, self._on_decode = prices, prices.candidate
        self._rates, self._queued_tokens = fleet.decode.rates.copy(), fleet.decode.queued_tokens.copy()
        self._sequences = fleet.decode.sequences
        self._held_tokens = np.minimum(prices.held_tokens, request.prompt_tokens - 1)

    def may_compute_at_most(self, most_tokens: int) -> bool:
        """Whether a worker could have to compute so few tokens of the prompt."""
        stored = [held.tokens for held in self._request.store_held.values()]
        cached_tokens = max([self._held_tokens.max(initial=0.0), *stored])
        return bool(self._request.prompt_tokens - cached_tokens <= most_tokens)

    def price(self) -> CandidatePrices:
        """The candidates."""
        request, rates, held, build = self._request, self._rates, self._held_tokens, self._on_decode
        reads = find_reads(request, self._decode, rates, held, stores=self._stores, peers={})
        cached = held if reads is None else held + reads.loaded_tokens
        uncached = request.prompt_tokens - cached
        queue_ms = rates.token_ms * self._queued_tokens
        prefill_ms = rates.compute_ms(uncached, request.prompt_tokens)
        # The batch stands still while the prompt is computed.
        others_ms = build.others_ms + self._sequences * prefill_ms
        total_ms = queue_ms + prefill_ms
        if reads is not None:
            total_ms = total_ms + reads.load_ms
        total_ms = total_ms + build.wait_ms + build.step_ms + others_ms
        local = _LocalCandidates(build, queue_ms, prefill_ms, others_ms, held, uncached, reads)
        return CandidatePrices(self._decode, total_ms, held, self._prices.load_tokens, cached, local)


@dataclass(slots=True)
class _LocalCandidates:
    decode: _DecodeCandidates
    queue_ms: Column
    prefill_ms: Column
    others_ms: Column
    held_tokens: Column
    uncached_tokens: Column
    reads: KvReads | None

    def __call__(self, row: int, refused: str) -> WorkerCandidate:
        decode, reads = self.decode, self.reads
        return WorkerCandidate(
            part="local",
            instance=decode.rows.instances[row],
            cost=Cost(
                queue_ms=self.queue_ms.item(row),
                prefill_ms=self.prefill_ms.item(row),
                load_ms=reads.load_ms.item(row) if reads is not None else 0.0,
                decode_queue_ms=decode.wait_ms.item(row),
                step_ms=decode.step_ms.item(row),
                others_ms=self.others_ms.item(row),
            ),
            held_tokens=int(self.held_tokens.item(row)),
            source=reads.source_of(row)[0] if reads is not None else "",
            loaded_tokens=int(reads.loaded_tokens.item(row)) if reads is not None else 0,
            uncached_tokens=int(self.uncached_tokens.item(row)),
            load_tokens=int(decode.load_tokens.item(row)),
            group=decode.rows.groups[row],
            refused=refused,
        )
