"""Checks a StartPrefill and turns it into the plan of a job."""

from __future__ import annotations

from dataclasses import dataclass

from libs.common.block_hash import SharedPrefix
from libs.common.cluster.fingerprint import Fingerprint
from libs.engine.step.types import EngineInfo, SequenceSpec
from libs.worker.requests.attempts import AttemptKey
from libs.worker.requests.prompt_cache import PromptCache
from libs.worker.requests.request_spec import check_fingerprint, parse_prompt, parse_sampling
from slipstream.errors import InvalidArgument
from slipstream.v1 import prefill_pb2


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """A checked prompt. `deadline_s` is on the event loop's clock."""

    key: AttemptKey
    spec: SequenceSpec
    kvstore_endpoint: str
    peer_endpoint: str  # a prefill worker that lends what it holds of the prefix
    decode_instance: str  # empty where the router states none
    lease_ms: int
    deadline_s: float | None


def plan_prefill(
    request: prefill_pb2.StartPrefill,
    fingerprint: Fingerprint,
    info: EngineInfo,
    *,
    memory: PromptCache,
    deadline_s: float | None,
) -> PrefillPlan:
    """Raises FingerprintMismatch, PrefixUnknown, or InvalidArgument naming the field."""
    check_fingerprint(fingerprint, request.fingerprint, of="the request")
    tokens, hashes = parse_prompt(
        request.prompt,
        request.block_hashes,
        request.prefix,
        root=fingerprint.digest,
        salt=request.salt,
        memory=memory,
        block_tokens=info.block_tokens,
        shared=SharedPrefix(request.shared_salt, request.shared_blocks),
    )
    n_emitted = request.emitted_tokens
    if n_emitted >= len(tokens):
        raise InvalidArgument("emitted_tokens", f"{n_emitted} of {len(tokens)} prompt tokens")
    key = AttemptKey(request.attempt.request_id, request.attempt.attempt)
    spec = SequenceSpec(
        seq_id=str(key),
        prompt=tokens[: len(tokens) - n_emitted],
        sampling=parse_sampling(request.sampling),
        block_hashes=hashes,
        emitted=tuple(tokens[len(tokens) - n_emitted :].tolist()),
        prefill_only=True,
        root=fingerprint.digest,
        salt=request.salt,
    )
    return PrefillPlan(
        key=key,
        spec=spec,
        kvstore_endpoint=request.kvstore_endpoint,
        peer_endpoint=request.peer_endpoint,
        decode_instance=request.decode_instance,
        lease_ms=request.lease_ms,
        deadline_s=deadline_s,
    )
