"""Find the sequences that can run in a step, and allocate the pages for their KV."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from libs.engine.kv.block_manager import BlockManager
from libs.engine.kv.sequence import EngineSequence, SequenceState
from libs.engine.scheduling.admission import n_usable_drafts
from libs.engine.scheduling.prefill_shares import PrefillShares
from libs.engine.scheduling.prefix_sharing import Following
from libs.engine.scheduling.scheduler import StepCandidate
from libs.engine.step.types import EngineInfo


def find_candidates(
    sequences: Iterable[EngineSequence],
    drafts: Mapping[str, Sequence[int]],
    following: Mapping[str, Following],
    *,
    shares: PrefillShares,
    blocks: BlockManager,
    info: EngineInfo,
) -> tuple[list[StepCandidate], list[EngineSequence]]:
    """The sequences that can run, with their pages, and the decoding sequences that lack a page."""
    candidates: list[StepCandidate] = []
    starved: list[EngineSequence] = []
    for sequence in sequences:
        seq_id, decoding = sequence.spec.seq_id, sequence.state is SequenceState.DECODING
        if not decoding and sequence.state is not SequenceState.PREFILLING:
            continue
        n_drafts = _n_usable(sequence, drafts.get(seq_id, ()), info) if decoding else 0
        if decoding and not sequence.grow(sequence.n_tokens, blocks):
            starved.append(sequence)
            continue
        while n_drafts and not sequence.grow(sequence.n_tokens + n_drafts, blocks):
            n_drafts -= 1
        candidates.append(
            StepCandidate(
                seq_id=seq_id,
                arrival=sequence.arrival,
                last_slice=sequence.last_slice,
                pending_tokens=sequence.pending_tokens,
                decoding=decoding,
                n_drafts=n_drafts,
                computed_tokens=sequence.n_computed,
                waited_tokens=sequence.waited_tokens,
                tenant_tag=0.0 if decoding else shares.tag(sequence.spec.salt),
                following=following.get(seq_id),
            )
        )
    return candidates, starved


def _n_usable(sequence: EngineSequence, drafts: Sequence[int], info: EngineInfo) -> int:
    n_usable = n_usable_drafts(
        drafts,
        info,
        n_tokens=sequence.n_tokens,
        n_output_left=sequence.spec.sampling.max_tokens - sequence.n_output,
    )
    if n_usable and sequence.constraint is not None:
        return sequence.constraint.count_allowed(drafts[:n_usable])
    return n_usable
