"""Parses requests from protobuf to the engine's types, and checks every bound. Does no I/O.

The router has filled in all defaults. So a value out of bounds is a defect of the sender, and the error names
the field.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from libs.common.block_hash import (
    MAX_SALT_BYTES,
    NOTHING_SHARED,
    SharedPrefix,
    TokenArray,
    as_tokens,
    chain_hashes,
)
from libs.common.cluster.fingerprint import Fingerprint, differences
from libs.worker.requests.prompt_cache import Prefix, PromptCache
from slipstream import bounds
from slipstream.block_hashes import HASH_BYTES, unpack_hashes
from slipstream.errors import FingerprintMismatch, InvalidArgument, PrefixUnknown
from slipstream.sampling import SAMPLING_RANGES, OutputConstraint, SamplingParams
from slipstream.v1 import common_pb2

TOKEN_BYTES = 4
MAX_STOP_TOKEN_IDS = 256
# All tools of a request together, or a schema, and the text around them.
MAX_GRAMMAR_CHARS = 4 << 20


def check_fingerprint(own: Fingerprint, other: common_pb2.Fingerprint, *, of: str) -> None:
    """Raises FingerprintMismatch naming `of`, the source of the other one, and the fields that differ."""
    different = differences(own.to_proto(), other)
    if different:
        raise FingerprintMismatch(f"fingerprint of {of} differs in {', '.join(different)}")


def parse_tokens(packed: bytes, field: str) -> TokenArray:
    """Token ids from little-endian u32. Raises InvalidArgument for a length that is no multiple of 4."""
    if len(packed) % TOKEN_BYTES:
        raise InvalidArgument(field, f"has {len(packed)} bytes, no multiple of {TOKEN_BYTES}")
    return np.frombuffer(packed, dtype="<u4")


def pack_tokens(tokens: object) -> bytes:
    """Token ids as little-endian u32."""
    return np.asarray(tokens, dtype="<u4").tobytes()


def parse_prompt(
    packed: bytes,
    packed_hashes: bytes,
    prefix: common_pb2.PromptReference,
    *,
    emitted: Sequence[int] = (),
    root: bytes,
    salt: bytes,
    memory: PromptCache,
    block_tokens: int,
    shared: SharedPrefix = NOTHING_SHARED,
) -> tuple[TokenArray, tuple[bytes, ...]]:
    """A prompt's ids, and the hashes of all full blocks of prompt ++ emitted. Caches the prompt.

    `prefix` refers to a cached prefix before the given ids and hashes; then only those are hashed. Raises
    PrefixUnknown when the tenant has no such prefix in the cache, InvalidArgument naming the field.
    """
    tokens = parse_tokens(packed, "prompt")
    known = Prefix()
    if prefix.blocks:
        found = memory.find(salt, prefix.hash, blocks=prefix.blocks)
        if found is None:
            raise PrefixUnknown(f"no cached prompt has that hash after {prefix.blocks} blocks")
        known = found
    hashes = parse_block_hashes(
        packed_hashes,
        tokens,
        emitted=emitted,
        root=known.hashes[-1] if known.hashes else root,
        salt=salt,
        block_tokens=block_tokens,
        shared=shared.after(len(known.hashes)),
    )
    if known.hashes:
        tokens, hashes = parse_tokens(b"".join([*known.ids, packed]), "prompt"), (*known.hashes, *hashes)
    if not len(tokens):
        raise InvalidArgument("prompt", "is empty")
    memory.insert(salt, tokens, hashes[: len(tokens) // block_tokens])
    return tokens, hashes


def parse_block_hashes(
    packed: bytes,
    prompt: TokenArray,
    *,
    emitted: Sequence[int] = (),
    root: bytes,
    salt: bytes,
    block_tokens: int,
    shared: SharedPrefix = NOTHING_SHARED,
) -> tuple[bytes, ...]:
    """Hashes of all full blocks of prompt ++ emitted; `packed` has those of the prompt alone.

    `root`: the hash of the block before them. A wrong hash would give this prompt's KV to other prompts, so
    the hashes are computed again, in about a microsecond a block. Raises InvalidArgument when they differ.
    """
    for field, value in (("salt", salt), ("shared_salt", shared.salt)):
        if len(value) > MAX_SALT_BYTES:
            raise InvalidArgument(field, f"has more than {MAX_SALT_BYTES} bytes")
    if shared.n_blocks > len(prompt) // block_tokens:
        raise InvalidArgument("shared_blocks", "are more than the prompt's full blocks")
    if len(packed) % HASH_BYTES:
        raise InvalidArgument("block_hashes", f"has {len(packed)} bytes, no multiple of {HASH_BYTES}")
    context = np.concatenate([prompt, as_tokens(emitted)]) if emitted else prompt
    own = chain_hashes(context, root=root, salt=salt, block_tokens=block_tokens, shared=shared)
    n_prompt = len(prompt) // block_tokens
    if unpack_hashes(packed) != own[:n_prompt]:
        raise InvalidArgument("block_hashes", f"are not those of the prompt's {n_prompt} full blocks")
    return tuple(own)


def parse_sampling(params: common_pb2.SamplingParams) -> SamplingParams:
    """Sampling parameters within bounds. Raises InvalidArgument naming the field."""
    plain = {name: getattr(params, name) for name in SAMPLING_RANGES}
    for name, value in plain.items():
        SAMPLING_RANGES[name].check(value)
    bounds.LOGIT_BIAS.check(len(params.logit_bias))
    for bias in params.logit_bias.values():
        bounds.LOGIT_BIAS_VALUE.check(bias)
    if params.max_tokens < 1:
        raise InvalidArgument("max_tokens", "must be at least 1")
    if len(params.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidArgument("stop_token_ids", f"has more than {MAX_STOP_TOKEN_IDS} entries")
    logprobs = params.top_logprobs if params.HasField("top_logprobs") else None
    if logprobs is not None:
        bounds.TOP_LOGPROBS.check(logprobs)
    prompt_logprobs = params.prompt_logprobs if params.HasField("prompt_logprobs") else None
    if prompt_logprobs is not None:
        bounds.PROMPT_LOGPROBS.check(prompt_logprobs)
    if len(params.banned_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidArgument("banned_token_ids", f"has more than {MAX_STOP_TOKEN_IDS} entries")
    return SamplingParams(
        **plain,
        logit_bias=dict(params.logit_bias),
        seed=params.seed,
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        stop_token_ids=tuple(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        banned_token_ids=tuple(params.banned_token_ids),
        constraint=parse_constraint(params.constraint) if params.HasField("constraint") else None,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def parse_constraint(constraint: common_pb2.OutputConstraint) -> OutputConstraint:
    """A constraint within bounds. Raises InvalidArgument naming the field."""
    if not 1 <= len(constraint.grammar) <= MAX_GRAMMAR_CHARS:
        raise InvalidArgument("constraint.grammar", f"must have 1 to {MAX_GRAMMAR_CHARS} characters")
    if len(constraint.forced) > MAX_STOP_TOKEN_IDS:
        raise InvalidArgument("constraint.forced", f"has more than {MAX_STOP_TOKEN_IDS} entries")
    return OutputConstraint(
        grammar=constraint.grammar,
        awaits_calls=constraint.awaits_calls,
        thinking=constraint.thinking,
        forced=tuple(constraint.forced),
        field=constraint.field or "grammar",
        is_closing=constraint.is_closing,
    )
