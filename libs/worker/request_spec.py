"""Requests as they travel -> what the engine takes, with every bound checked. No network here.

The router has filled all defaults; what arrives here out of bounds is a defect of a peer, and is
refused by name rather than run.
"""

from __future__ import annotations

import math

import numpy as np

from libs.common.block_hash import HASH_BYTES, MAX_SALT_BYTES, TokenArray, chain_hashes, unpack_hashes
from libs.common.errors import FingerprintMismatch, InvalidArgument
from libs.common.fingerprint import Fingerprint
from libs.engine.types import SamplingParams
from slipstream.v1 import common_pb2

TOKEN_BYTES = 4
MAX_TOP_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKEN_IDS = 256


def check_fingerprint(own: Fingerprint, other: common_pb2.Fingerprint, *, whose: str) -> None:
    """Raises FingerprintMismatch naming the fields that differ."""
    different = own.differences(other)
    if different:
        raise FingerprintMismatch(f"fingerprint of {whose} differs in {', '.join(different)}")


def parse_tokens(packed: bytes, field: str) -> TokenArray:
    """Little-endian u32 -> array. Raises InvalidArgument for a length that is no multiple of 4."""
    if len(packed) % TOKEN_BYTES:
        raise InvalidArgument(field, f"has {len(packed)} bytes, no multiple of {TOKEN_BYTES}")
    return np.frombuffer(packed, dtype="<u4")


def pack_tokens(tokens: object) -> bytes:
    """Token ids -> little-endian u32."""
    return np.asarray(tokens, dtype="<u4").tobytes()


def parse_block_hashes(
    packed: bytes, tokens: TokenArray, *, root: bytes, salt: bytes, block_tokens: int
) -> tuple[bytes, ...]:
    """The hashes of the prompt's full blocks, checked against its tokens.

    A wrong hash would give this prompt's KV to other prompts, so it is recomputed: a microsecond a block.
    """
    if len(salt) > MAX_SALT_BYTES:
        raise InvalidArgument("salt", f"has more than {MAX_SALT_BYTES} bytes")
    if len(packed) % HASH_BYTES:
        raise InvalidArgument("block_hashes", f"has {len(packed)} bytes, no multiple of {HASH_BYTES}")
    own = chain_hashes(tokens, root=root, salt=salt, block_tokens=block_tokens)
    if unpack_hashes(packed) != own:
        raise InvalidArgument("block_hashes", f"are not those of the prompt's {len(own)} full blocks")
    return tuple(own)


def parse_sampling(params: common_pb2.SamplingParams) -> SamplingParams:
    """Sampling parameters within bounds. Raises InvalidArgument naming the field."""
    _within("temperature", params.temperature, 0.0, 100.0)
    _within("top_p", params.top_p, 0.0, 1.0)
    _within("min_p", params.min_p, 0.0, 1.0)
    _within("presence_penalty", params.presence_penalty, -100.0, 100.0)
    _within("frequency_penalty", params.frequency_penalty, -100.0, 100.0)
    _within("repetition_penalty", params.repetition_penalty, 0.0, 100.0)
    for name in ("top_p", "repetition_penalty"):
        if getattr(params, name) == 0.0:
            raise InvalidArgument(f"sampling.{name}", "must be positive")
    if params.max_tokens < 1:
        raise InvalidArgument("sampling.max_tokens", "must be at least 1")
    if len(params.logit_bias) > MAX_LOGIT_BIAS:
        raise InvalidArgument("sampling.logit_bias", f"has more than {MAX_LOGIT_BIAS} entries")
    if any(not math.isfinite(bias) for bias in params.logit_bias.values()):
        raise InvalidArgument("sampling.logit_bias", "must be finite")
    if len(params.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidArgument("sampling.stop_token_ids", f"has more than {MAX_STOP_TOKEN_IDS} entries")
    logprobs = params.top_logprobs if params.HasField("top_logprobs") else None
    if logprobs is not None and logprobs > MAX_TOP_LOGPROBS:
        raise InvalidArgument("sampling.top_logprobs", f"exceeds {MAX_TOP_LOGPROBS}")
    return SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=dict(params.logit_bias),
        seed=params.seed,
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        stop_token_ids=tuple(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        logprobs=logprobs,
    )


def _within(name: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise InvalidArgument(f"sampling.{name}", f"must be within [{low:g}, {high:g}], not {value}")
