"""Commit a step's result to the state of a sequence and make the step's output."""

from __future__ import annotations

from collections.abc import Sequence

from libs.engine.core.step_outputs import StepOutputs
from libs.engine.kv.block_features import BlockFeatures
from libs.engine.kv.block_manager import BlockManager
from libs.engine.kv.sequence import EngineSequence, SequenceState
from libs.engine.sampling.verify import count_accepted
from libs.engine.step.device_rows import FeatureArray
from libs.engine.step.prompt_scores import PromptScores
from libs.engine.step.step_model import BAD_TOKEN
from libs.engine.step.types import FullBlock, StepOutput
from slipstream.errors import Internal, InvalidArgument, SlipstreamError


def commit_outputs(
    sequence: EngineSequence,
    sampled: StepOutputs,
    blocks: BlockManager,
    features: BlockFeatures,
    *,
    max_context_tokens: int,
) -> StepOutput:
    """Advance a sequence by its rows of a step: prompt tokens, or sampled tokens with the accepted drafts."""
    start = sequence.n_computed
    n_known = sampled.rows.n_rows - sampled.n_drafts
    if sampled.scores is not None and not sampled.scores.is_finite:
        return fail(sequence, _not_finite(sequence, blocks, features))
    if not sampled.rows.n_sampled:
        sequence.n_computed = start + n_known
        _keep_features(sequence, start, sampled.features)
        return progress(sequence, sampled.shared_tokens, blocks, features, scores=sampled.scores)
    drafts = sampled.rows.tokens[len(sampled.rows.tokens) - sampled.n_drafts :].tolist()
    accepted = count_accepted(drafts, sampled.tokens)
    failure = _failure(sequence, sampled.tokens[: accepted + 1], blocks, features)
    if failure is not None:
        return fail(sequence, failure)
    tokens, finish = sequence.cut(sampled.tokens[: accepted + 1], max_context_tokens=max_context_tokens)
    sequence.append(tokens)
    is_closing = sequence.constraint is not None and sequence.constraint.is_closing
    if finish == "stop" and is_closing:
        finish = "length"  # the model itself would have gone on
    sequence.n_computed = start + n_known + len(tokens) - 1
    rows = None if sampled.features is None else sampled.features[: sequence.n_computed - start]
    _keep_features(sequence, start, rows)
    new_full_blocks = _commit_blocks(sequence, blocks, features)
    feature_start, newest = sequence.features.pop()
    sequence.state = (
        SequenceState.FINISHED if finish or sequence.spec.prefill_only else SequenceState.DECODING
    )
    return StepOutput(
        seq_id=sequence.spec.seq_id,
        tokens=tokens,
        computed_tokens=sequence.n_computed,
        shared_tokens=sampled.shared_tokens,
        finish=finish,
        is_closing=is_closing,
        logprobs=sampled.logprobs[: len(tokens)] if sampled.logprobs else None,
        accepted_drafts=min(accepted, len(tokens)),
        proposed_drafts=sampled.n_drafts,
        features=newest,
        feature_tokens=None if newest is None else sequence.tokens_after(feature_start, len(newest)),
        feature_start=feature_start,
        new_full_blocks=new_full_blocks,
        scores=sampled.scores,
    )


def progress(
    sequence: EngineSequence,
    shared_tokens: int,
    blocks: BlockManager,
    features: BlockFeatures,
    *,
    scores: PromptScores | None = None,
) -> StepOutput:
    """The output of a prompt that has advanced, without a first token."""
    return StepOutput(
        sequence.spec.seq_id,
        (),
        sequence.n_computed,
        shared_tokens,
        new_full_blocks=_commit_blocks(sequence, blocks, features),
        scores=scores,
    )


def _failure(
    sequence: EngineSequence, tokens: Sequence[int], blocks: BlockManager, features: BlockFeatures
) -> SlipstreamError | None:
    """Why these tokens cannot be committed."""
    if sequence.constraint is not None and sequence.constraint.failure:
        return InvalidArgument(sequence.constraint.field, sequence.constraint.failure)
    if BAD_TOKEN in tokens:
        return _not_finite(sequence, blocks, features)
    return None


def _not_finite(sequence: EngineSequence, blocks: BlockManager, features: BlockFeatures) -> SlipstreamError:
    blocks.uncache(sequence.pages)  # damaged KV may be the cause, so it must not be reused
    features.drop(sequence.hashes)
    return Internal("the model's logits are not finite")


def fail(sequence: EngineSequence, failure: SlipstreamError) -> StepOutput:
    """Mark the sequence as failed. It keeps its pages until `release`."""
    sequence.state = SequenceState.FAILED
    return StepOutput(sequence.spec.seq_id, (), sequence.n_computed, failure=failure)


def _commit_blocks(
    sequence: EngineSequence, blocks: BlockManager, features: BlockFeatures
) -> tuple[FullBlock, ...]:
    first = sequence.n_committed_blocks
    new_full_blocks = sequence.commit_blocks(sequence.n_computed, blocks)
    sequence.keep_features(first, features)
    return new_full_blocks


def _keep_features(sequence: EngineSequence, start: int, rows: FeatureArray | None) -> None:
    if rows is None:
        sequence.features.pop()  # the rows before the step no longer follow on
    elif len(rows):
        sequence.features.append(start, rows)
