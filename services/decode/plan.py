"""Checks a StartSequence and turns it into the plan of a sequence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from libs.common.block_hash import SharedPrefix
from libs.common.cluster.fingerprint import Fingerprint
from libs.common.telemetry import tracing
from libs.engine.step.types import EngineInfo, SequenceSpec
from libs.worker.requests.attempts import AttemptKey
from libs.worker.requests.prompt_cache import PromptCache
from libs.worker.requests.request_spec import check_fingerprint, parse_prompt, parse_sampling, parse_tokens
from slipstream.enum_names import TRANSPORTS
from slipstream.errors import FailedPrecondition, InvalidArgument
from slipstream.v1 import decode_pb2, prefill_pb2


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """A checked sequence. `deadline_s` is on the event loop's clock."""

    key: AttemptKey
    spec: SequenceSpec
    ticket: prefill_pb2.HandoffTicket | None  # None = compute the prompt here
    kvstore_endpoint: str
    store_generated: bool
    drafts: bool
    deadline_s: float | None
    trace: Mapping[str, str]  # W3C context of the request; empty = none, or nothing is traced


def plan_decode(
    start: decode_pb2.StartSequence,
    fingerprint: Fingerprint,
    info: EngineInfo,
    *,
    memory: PromptCache,
    transport_kind: str,
    deadline_s: float | None,
) -> DecodePlan:
    """Raises FingerprintMismatch, FailedPrecondition, PrefixUnknown, or InvalidArgument naming the field."""
    check_fingerprint(fingerprint, start.fingerprint, of="the request")
    emitted = tuple(parse_tokens(start.emitted, "emitted").tolist())
    prompt, hashes = parse_prompt(
        start.prompt,
        start.block_hashes,
        start.prefix,
        emitted=emitted,
        root=fingerprint.digest,
        salt=start.salt,
        memory=memory,
        block_tokens=info.block_tokens,
        shared=SharedPrefix(start.shared_salt, start.shared_blocks),
    )
    key = AttemptKey(start.attempt.request_id, start.attempt.attempt)
    spec = SequenceSpec(
        seq_id=str(key),
        prompt=prompt,
        sampling=parse_sampling(start.sampling),
        block_hashes=hashes,
        emitted=emitted,
        root=fingerprint.digest,
        salt=start.salt,
    )
    ticket = None
    if start.ticket:
        ticket = parse_ticket(start.ticket, spec, fingerprint, info, transport_kind=transport_kind)
    return DecodePlan(
        key=key,
        spec=spec,
        ticket=ticket,
        kvstore_endpoint=start.kvstore_endpoint,
        store_generated=start.store_generated,
        drafts=not start.disable_drafts and info.feature_width > 0,
        deadline_s=deadline_s,
        trace=dict(start.trace) if tracing.enabled() else {},
    )


def parse_ticket(
    packed: bytes, spec: SequenceSpec, fingerprint: Fingerprint, info: EngineInfo, *, transport_kind: str
) -> prefill_pb2.HandoffTicket:
    """A ticket that fits the sequence and this worker; anything else is refused, never run."""
    try:
        ticket = prefill_pb2.HandoffTicket.FromString(packed)
    except DecodeError as error:
        raise InvalidArgument("ticket", "is no handoff ticket") from error
    check_fingerprint(fingerprint, ticket.fingerprint, of="the ticket")
    if ticket.transport != TRANSPORTS.value(transport_kind):
        name = TRANSPORTS.name(ticket.transport)
        raise FailedPrecondition(f"the exporter speaks {name}, this worker {transport_kind}")
    named = str(AttemptKey(ticket.attempt.request_id, ticket.attempt.attempt))
    if named != spec.seq_id:  # the KV of another prompt of this length would make wrong tokens
        raise InvalidArgument("ticket", f"is of {named}, not of {spec.seq_id}")
    if ticket.prompt_tokens != spec.context_tokens:
        raise InvalidArgument(
            "ticket", f"is for {ticket.prompt_tokens} tokens, the sequence has {spec.context_tokens}"
        )
    n_blocks = -(-spec.context_tokens // info.block_tokens)
    if len(ticket.blocks) != n_blocks or any(b.n_bytes != info.page_bytes for b in ticket.blocks):
        raise InvalidArgument("ticket", f"does not export {n_blocks} blocks of {info.page_bytes} bytes")
    return ticket
