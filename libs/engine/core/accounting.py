"""Counts of what an engine holds."""

from __future__ import annotations

from collections.abc import Collection

from libs.engine.kv.block_manager import BlockManager
from libs.engine.kv.sequence import EngineSequence, SequenceState
from libs.engine.step.types import EngineLedger


def count_ledger(
    blocks: BlockManager,
    sequences: Collection[EngineSequence],
    *,
    pinned_pages: int,
    pages_awaited: int,
    launched_pages: int,
    steps_aborted: int,
) -> EngineLedger:
    """Count pages and sequences by state; see `EngineLedger`."""
    by_state = dict.fromkeys(SequenceState, 0)
    for sequence in sequences:
        by_state[sequence.state] += 1
    return EngineLedger(
        pages_free=blocks.free_pages,
        pages_cached=blocks.cached_pages,
        pages_held=blocks.held_pages,
        sequences_reserved=by_state[SequenceState.RESERVED],
        sequences_prefilling=by_state[SequenceState.PREFILLING],
        sequences_decoding=by_state[SequenceState.DECODING],
        sequences_finished=by_state[SequenceState.FINISHED] + by_state[SequenceState.FAILED],
        pinned_pages=pinned_pages,
        prefill_tokens_waiting=sum(
            s.pending_tokens for s in sequences if s.state is SequenceState.PREFILLING
        ),
        decode_context_tokens=sum(s.n_tokens for s in sequences if s.state is SequenceState.DECODING),
        pages_awaited=pages_awaited,
        launched_pages=launched_pages,
        steps_aborted=steps_aborted,
    )
