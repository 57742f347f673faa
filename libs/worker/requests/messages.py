"""Converts parts of responses to protobuf messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, MutableSequence, Sequence

import numpy as np
import numpy.typing as npt

from libs.engine.step.prompt_scores import PromptScores
from libs.engine.step.types import FinishReason, FloatArray, TokenLogprobs
from slipstream.errors import InvalidArgument
from slipstream.v1 import common_pb2

MAX_PIECE_LOGPROBS = 4096
FEATURE_BYTES = 2  # of a value on the wire: bfloat16, as models compute and heads are trained

# Features [rows, width] of a target: as an engine computes them, or the bits of their bfloat16.
Bfloat16Array = npt.NDArray[np.uint16]
Features = FloatArray | Bfloat16Array

_FINISH: dict[FinishReason | None, common_pb2.FinishReason.ValueType] = {
    None: common_pb2.FINISH_REASON_UNSPECIFIED,
    "stop": common_pb2.FINISH_REASON_STOP,
    "length": common_pb2.FINISH_REASON_LENGTH,
}


def finish_reason(finish: FinishReason | None) -> common_pb2.FinishReason.ValueType:
    """The engine's finish reason; None: the sequence continues."""
    return _FINISH[finish]


def position_logprobs(logprobs: TokenLogprobs) -> common_pb2.PositionLogprobs:
    """Log probabilities at one generated token."""
    return common_pb2.PositionLogprobs(
        logprob=logprobs.logprob,
        top=[common_pb2.TokenLogprob(token_id=token, logprob=value) for token, value in logprobs.top],
    )


def prompt_logprobs(scores: PromptScores) -> Iterator[common_pb2.PromptLogprobs]:
    """The rows in messages of at most MAX_PIECE_LOGPROBS log probabilities, about 32 KiB."""
    top = scores.top_ids.shape[1]
    n_rows = max(1, MAX_PIECE_LOGPROBS // (1 + top))
    for start in range(0, len(scores), n_rows):
        piece = scores.part(slice(start, start + n_rows), first=scores.first + start, top=top)
        yield common_pb2.PromptLogprobs(
            first_position=piece.first,
            logprobs=piece.logprobs.astype("<f4").tobytes(),
            ranks=piece.ranks.astype("<u4").tobytes(),
            top_ids=piece.top_ids.astype("<u4").tobytes(),
            top_logprobs=piece.top_logprobs.astype("<f4").tobytes(),
        )


def add_cached_tokens(
    cached: MutableSequence[common_pb2.CachedTokens],
    tiers: Sequence[common_pb2.CacheTier.ValueType],
    block_tokens: int,
) -> None:
    """Add one block for each entry of `tiers` to `cached`, which has at most one entry for each tier."""
    for tier, n_blocks in sorted(Counter(tiers).items()):
        for entry in cached:
            if entry.tier == tier:
                entry.tokens += n_blocks * block_tokens
                break
        else:
            cached.append(common_pb2.CachedTokens(tier=tier, tokens=n_blocks * block_tokens))


def pack_features(features: Features) -> bytes:
    """Features [rows, width] as little-endian bfloat16, rounded to the nearest, ties to even."""
    return bfloat16_features(features).tobytes()


def bfloat16_features(features: Features) -> Bfloat16Array:
    """The bits of the features in bfloat16; those that have this form already are not copied."""
    if features.dtype == np.uint16:
        return features.view("<u2")
    bits = np.ascontiguousarray(features, dtype="<f4").view("<u4")
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    # Rounding could carry a NaN into the sign; the drafter must see it, to refuse it.
    return np.where(np.isnan(features), 0x7FC0, rounded).astype("<u2")


def float_features(features: Features) -> FloatArray:
    """Inverse of `bfloat16_features`; float32 is not copied."""
    if features.dtype == np.uint16:
        return (features.astype("<u4") << 16).view("<f4")
    return features.view("<f4")


def parse_bfloat16(packed: bytes, width: int, field: str) -> Bfloat16Array:
    """The rows of `pack_features`, without a copy. Raises InvalidArgument for what is no whole rows."""
    if width < 1 or len(packed) % (FEATURE_BYTES * width):
        raise InvalidArgument(field, f"{len(packed)} bytes are no rows of {width} values")
    return np.frombuffer(packed, dtype="<u2").reshape(-1, width)


def parse_features(packed: bytes, width: int, field: str) -> FloatArray:
    """The rows of `pack_features` as float32. Raises InvalidArgument like `parse_bfloat16`."""
    return float_features(parse_bfloat16(packed, width, field))
