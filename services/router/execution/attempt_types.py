"""What an attempt at a request (attempt.py) is made from, and what it reports."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from services.router.workers.connection import WorkerConnection
from services.router.workers.decode_client import DecodeClient
from services.router.workers.prompt_delta import OutgoingPrompt
from slipstream import errors
from slipstream.v1 import common_pb2, decode_pb2

FINISH_NONE = common_pb2.FINISH_REASON_UNSPECIFIED


class AttemptSpec(msgspec.Struct, frozen=True):
    """What every attempt at a request has in common. `deadline_s` is on the event loop's clock."""

    request_id: str
    epoch: int
    fingerprint: common_pb2.Fingerprint
    prompt: OutgoingPrompt
    sampling: common_pb2.SamplingParams
    store_generated: bool
    deadline_s: float | None


class WorkerPair(msgspec.Struct, frozen=True):
    """The workers of an attempt. Without `prefill` the decode worker computes the prompt."""

    prefill: WorkerConnection | None
    decode: WorkerConnection
    decode_stream: DecodeClient
    kvstore_endpoint: str
    peer_endpoint: str = ""  # a prefill worker that lends what `prefill` lacks
    uncached_tokens: int | None = None  # expected to be computed; None = unknown

    @property
    def keys(self) -> list[str]:
        """The keys of the connections."""
        return [link.key for link in (self.prefill, self.decode) if link is not None]


class TokenBatch(msgspec.Struct, frozen=True, gc=False):
    """Tokens that came together. `finish` and `stats` come with the last ones."""

    tokens: Sequence[int]
    logprobs: Sequence[common_pb2.PositionLogprobs] = ()
    cached: Sequence[common_pb2.CachedTokens] | None = None  # with the first token
    prefill_ms: float | None = None  # with the first token of a prefill worker: queue and work
    finish: common_pb2.FinishReason.ValueType = FINISH_NONE
    stats: decode_pb2.SequenceStats | None = None


class WorkerFailed(Exception):
    """The attempt cannot go on; `worker` is the key of the connection to blame.

    `died`: the whole worker, or its engine, broke while it ran this. `moved`: nothing failed, the worker
    drains. `other`: the key of a second worker that may be to blame, when something broke between the two.
    """

    def __init__(
        self,
        error: errors.SlipstreamError,
        worker: str,
        *,
        died: bool = False,
        moved: bool = False,
        other: str = "",
    ) -> None:
        super().__init__(str(error))
        self.error = error
        self.worker = worker
        self.died = died
        self.moved = moved
        self.other = other
