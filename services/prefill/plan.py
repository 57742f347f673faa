"""A PrefillRequest, checked and turned into what the job works with."""

from __future__ import annotations

from dataclasses import dataclass

from libs.common.errors import InvalidArgument
from libs.common.fingerprint import Fingerprint
from libs.engine.types import EngineInfo, SequenceSpec
from libs.worker.attempts import AttemptKey
from libs.worker.request_spec import check_fingerprint, parse_block_hashes, parse_sampling, parse_tokens
from slipstream.v1 import prefill_pb2


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """What to compute, for whom, until when. `deadline_s` is on the event loop's clock."""

    key: AttemptKey
    spec: SequenceSpec
    kvstore_endpoint: str
    peer_endpoint: str  # a prefill worker that lends what it holds of the prefix
    lease_ms: int
    deadline_s: float | None


def plan_prefill(
    request: prefill_pb2.PrefillRequest,
    fingerprint: Fingerprint,
    info: EngineInfo,
    *,
    deadline_s: float | None,
) -> PrefillPlan:
    """Raises FingerprintMismatch, or InvalidArgument naming the field."""
    check_fingerprint(fingerprint, request.fingerprint, whose="the request")
    tokens = parse_tokens(request.prompt, "prompt")
    n_emitted = request.emitted_tokens
    if not len(tokens):
        raise InvalidArgument("prompt", "is empty")
    if n_emitted >= len(tokens):
        raise InvalidArgument("emitted_tokens", f"{n_emitted} of {len(tokens)} prompt tokens")
    hashes = parse_block_hashes(
        request.block_hashes,
        tokens,
        root=fingerprint.digest,
        salt=request.salt,
        block_tokens=info.block_tokens,
    )
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
        key, spec, request.kvstore_endpoint, request.peer_endpoint, request.lease_ms, deadline_s
    )
