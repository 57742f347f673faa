"""What the sequences of one stream got from this drafter, as spans below those of their decode worker."""

from __future__ import annotations

from dataclasses import dataclass

from opentelemetry.trace import INVALID_SPAN, Span

from libs.common.block_hash import TokenArray
from libs.common.telemetry import tracing
from services.drafter.batcher import Proposal
from slipstream.v1 import drafter_pb2


@dataclass(slots=True)
class _Drafting:
    span: Span
    base_tokens: int = 0  # committed length that is known here
    rows: int = 0
    proposals: int = 0
    proposed_drafts: int = 0
    matched_drafts: int = 0
    latest: tuple[int, ...] = ()  # proposed to follow `base_tokens`


class DraftSpans:
    """One span for each sequence that carries a context, from its first rows to its end."""

    def __init__(self) -> None:
        self._open: dict[str, _Drafting] = {}

    def extended(self, seq_id: str, extend: drafter_pb2.ExtendContext, tokens: TokenArray) -> None:
        """Rows came; `tokens`: of positions start_position + 1 on."""
        drafting = self._open.get(seq_id)
        if drafting is None:
            span = tracing.begin_server("drafts", lambda: extend.trace)
            if span is INVALID_SPAN:
                return
            drafting = self._open[seq_id] = _Drafting(span)
        follows = drafting.base_tokens - extend.start_position - 1
        if follows >= 0:
            came = tokens[follows:].tolist()
            pairs = zip(drafting.latest, came, strict=False)
            drafting.matched_drafts += next(
                (i for i, (draft, token) in enumerate(pairs) if draft != token),
                min(len(drafting.latest), len(came)),
            )
        drafting.latest = ()
        drafting.base_tokens = extend.start_position + len(tokens) + 1
        drafting.rows += len(tokens)

    def proposed(self, proposal: Proposal) -> None:
        """The proposal is on its way. One for a length that has passed matches nothing any more."""
        drafting = self._open.get(proposal.seq_id)
        if drafting is None or not proposal.tokens:
            return
        drafting.proposals += 1
        drafting.proposed_drafts += len(proposal.tokens)
        if proposal.base_tokens == drafting.base_tokens:
            drafting.latest = proposal.tokens

    def closed(self, seq_id: str) -> None:
        """The sequence ended. Idempotent."""
        drafting = self._open.pop(seq_id, None)
        if drafting is None:
            return
        tracing.annotate(
            drafting.span,
            rows=drafting.rows,
            proposals=drafting.proposals,
            proposed_drafts=drafting.proposed_drafts,
            matched_drafts=drafting.matched_drafts,
        )
        drafting.span.end()

    def close(self) -> None:
        """The stream ended."""
        for seq_id in list(self._open):
            self.closed(seq_id)
