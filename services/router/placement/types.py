"""The records that placement reads and the decision that it returns. Pure.

`gc=False` keeps the records that each request makes out of garbage collection: none refers to one that refers
back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field

import msgspec

from services.router.placement.cost_model import DecodeModel, PrefillModel


class HeldTokens(msgspec.Struct, frozen=True, gc=False):
    """How many leading tokens of a prompt have KV in a kvstore: `dram_tokens` of them in memory."""

    tokens: int = 0
    dram_tokens: int = 0


class PlacementRequest(msgspec.Struct, frozen=True, gc=False):
    """The properties of a request that decide where it runs.

    The maps give, by instance, how many leading tokens of the prompt have KV there; an instance that is not
    in a map has none. A wrong entry costs time and nothing else. `seed` settles ties; `content_key` picks the
    kvstore of a prompt that no kvstore holds yet, so that equal prompts share one.
    """

    prompt_tokens: int
    seed: int = 0
    fingerprint: str = ""  # a worker runs the request only if its fingerprint is the same
    output_tokens: int = 256  # expected
    # Reported by the worker, or predicted from the requests that were sent to it.
    prefill_expected_tokens: Mapping[str, int] = msgspec.field(default_factory=dict)
    # Reported by the worker. A worker that is not in it has all that is expected of it.
    prefill_confirmed_tokens: Mapping[str, int] = msgspec.field(default_factory=dict)
    # Readable by other prefill workers.
    prefill_lendable_tokens: Mapping[str, int] = msgspec.field(default_factory=dict)
    decode_expected_tokens: Mapping[str, int] = msgspec.field(default_factory=dict)
    store_held: Mapping[str, HeldTokens] = msgspec.field(default_factory=dict)
    content_key: bytes = b""
    pinned_prefill: str = ""
    may_skip_prefill: bool = False  # a decode worker may compute the prompt itself
    # Instances that failed an earlier attempt of this request.
    failed_prefill: Set[str] = frozenset()
    failed_decode: Set[str] = frozenset()
    failed_stores: Set[str] = frozenset()


class PrefillWorker(msgspec.Struct, frozen=True, gc=False):
    """One prefill worker. `refused`: the reason why it gets no requests now, "" = it gets requests.

    `queued_tokens` of `queued_requests` wait or run there, sent by any router. `queue` lists the tokens of
    this router's own requests among them, one number a request.
    """

    instance: str
    fingerprint: str = ""
    transport: str = ""
    region: str = ""
    refused: str = ""
    queued_tokens: int = 0
    queued_requests: int = 0
    queue: tuple[int, ...] = ()
    cold_turn: int = 0  # number of the last cold request that this router sent there; 0 = none
    model: PrefillModel = msgspec.field(default_factory=PrefillModel)


class DecodeWorker(msgspec.Struct, frozen=True, gc=False):
    """One decode worker; see PrefillWorker. `sequences` run there, with `context_tokens` in all."""

    instance: str
    fingerprint: str = ""
    transport: str = ""
    region: str = ""
    refused: str = ""
    context_tokens: int = 0
    sequences: int = 0
    queued_tokens: int = 0  # of prompts that it computes itself
    free_blocks: int | None = None  # pages that are free or can be evicted; None = unknown
    max_sequences: int = 0  # 0 = unknown
    block_tokens: int = 64
    block_bytes: int = 0  # 0 = unknown
    model: DecodeModel = msgspec.field(default_factory=DecodeModel)
    prefill_model: PrefillModel = msgspec.field(default_factory=PrefillModel)


class KvStore(msgspec.Struct, frozen=True, gc=False):
    """One kvstore node. `refused`: as for a PrefillWorker."""

    instance: str
    transport: str = ""
    region: str = ""
    refused: str = ""


class PlacementFleet(msgspec.Struct, frozen=True, gc=False):
    """All workers at one moment. `region_ms`: the round trip from this router by region; 0 if not named."""

    prefill: tuple[PrefillWorker, ...] = ()
    decode: tuple[DecodeWorker, ...] = ()
    stores: tuple[KvStore, ...] = ()
    region_ms: Mapping[str, float] = msgspec.field(default_factory=dict)


class Cost(msgspec.Struct, frozen=True, gc=False):
    """Predicted milliseconds, term by term."""

    queue_ms: float = 0.0  # computing the prompts that the worker serves first
    prefill_ms: float = 0.0  # computing the tokens without KV
    load_ms: float = 0.0  # reading KV from a kvstore or from another prefill worker
    transfer_ms: float = 0.0  # moving KV from prefill to decode
    decode_queue_ms: float = 0.0  # waiting for pages and for a place in the batch
    step_ms: float = 0.0  # the request's own decode steps, weighted
    others_ms: float = 0.0  # delay of other requests: queued prompts, and sequences of the batch
    region_ms: float = 0.0  # the round trip to the region

    @property
    def total_ms(self) -> float:
        """The sum, by which candidates are compared."""
        return (
            self.queue_ms
            + self.prefill_ms
            + self.load_ms
            + self.transfer_ms
            + self.decode_queue_ms
            + self.step_ms
            + self.others_ms
            + self.region_ms
        )

    def plus(self, other: Cost) -> Cost:
        """The sum of two costs, term by term."""
        return Cost(
            self.queue_ms + other.queue_ms,
            self.prefill_ms + other.prefill_ms,
            self.load_ms + other.load_ms,
            self.transfer_ms + other.transfer_ms,
            self.decode_queue_ms + other.decode_queue_ms,
            self.step_ms + other.step_ms,
            self.others_ms + other.others_ms,
            self.region_ms + other.region_ms,
        )


class WorkerCandidate(msgspec.Struct, frozen=True, gc=False):
    """One way to run one part of the request. `part`: prefill, decode, or local (both on a decode worker)."""

    part: str
    instance: str
    cost: Cost
    held_tokens: int = 0  # with KV on the worker itself
    source: str = ""  # where `loaded_tokens` are read: a kvstore, or with `from_peer` a prefill worker
    from_peer: bool = False
    loaded_tokens: int = 0
    ahead_tokens: int = 0  # computed before this request, of `ahead_requests`
    ahead_requests: int = 0
    longer_tokens: int = 0  # of queued prompts that need more than this one
    uncached_tokens: int = 0  # to compute; 0 for part "decode"
    load_tokens: int = 0  # in flight there, as bounded load counts them
    group: tuple[str, str] = ("", "")  # transport, region
    cold_turn: int = 0
    refused: str = ""


class ChoiceReason(msgspec.Struct, frozen=True, gc=False):
    """Why one part of the request runs where it runs. `rule` is a `Rule` of explanation.py.

    With rule "cost", `term` of `against` exceeds the same term of `chosen` by `difference_ms`, and no other
    term differs more. `against` is the cheapest usable alternative, or a worker that holds more KV.
    """

    part: str  # prefill, decode, local or pair
    chosen: str
    rule: str
    against: str = ""
    term: str = ""  # a field of Cost
    difference_ms: float = 0.0
    text: str = ""


def _no_candidates() -> tuple[WorkerCandidate, ...]:
    return ()


@dataclass(slots=True)
class PlacementDecision:
    """Where to run. `prefill` "": the decode worker computes the prompt itself.

    `kvstore` is the node that KV is read from and new blocks are written to. `peer` is a prefill worker to
    read from first. `source` names the one of the two that is expected to hold KV beyond the worker's own,
    else it is "worker" or "nothing". `cached_tokens` are not computed, as predicted.
    """

    prefill: str
    decode: str
    kvstore: str
    source: str
    reason: str
    peer: str = ""
    cold: bool = False
    cached_tokens: int = 0
    uncached_tokens: int = 0
    cost: Cost = field(default_factory=Cost)
    reasons: tuple[ChoiceReason, ...] = ()
    # The candidates that run the request: prefill and decode, or local alone.
    chosen: tuple[WorkerCandidate, ...] = ()
    list_candidates: Callable[[], tuple[WorkerCandidate, ...]] = field(
        default=_no_candidates, compare=False, repr=False
    )

    @property
    def candidates(self) -> tuple[WorkerCandidate, ...]:
        """All candidates with their costs, in the order of the fleet: prefill, decode, local."""
        return self.list_candidates()
