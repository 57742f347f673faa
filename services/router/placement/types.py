"""The records that placement reads, and the decision that it returns. Pure.

A decision makes some hundred of these records. `gc=False` keeps them out of garbage collection: no record
refers to one that refers back.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from services.router.placement.cost_model import DecodeModel, PrefillModel

Group = tuple[str, str]  # transport, region: KV moves only between workers of one group


class HeldTokens(msgspec.Struct, frozen=True, gc=False):
    """How many leading tokens of a prompt have KV in a kvstore: `dram_tokens` of them in memory."""

    tokens: int = 0
    dram_tokens: int = 0


class PlacementRequest(msgspec.Struct, frozen=True, gc=False):
    """The properties of a request that decide where it runs.

    The maps give, by instance, how many leading tokens of the prompt have KV there; an instance that is not
    in a map has none. A wrong entry costs time and nothing else. `seed` breaks ties; `content_key` picks the
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
    requested_prefill: str = ""
    may_skip_prefill: bool = False  # a decode worker may compute the prompt itself


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
    last_cold: int = 0  # number of the last cold request that this router sent there; 0 = none
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


class PlacementCost(msgspec.Struct, frozen=True, gc=False):
    """Predicted milliseconds, term by term, and their sum, by which candidates are compared."""

    queue_ms: float = 0.0  # computing the prompts that the worker serves first
    prefill_ms: float = 0.0  # computing the tokens without KV
    load_ms: float = 0.0  # reading KV from a kvstore or from another prefill worker
    transfer_ms: float = 0.0  # moving KV from prefill to decode
    decode_queue_ms: float = 0.0  # waiting for pages and for a place in the batch
    step_ms: float = 0.0  # the request's own decode steps, weighted
    others_ms: float = 0.0  # delay of other requests: queued prompts, and sequences of the batch
    region_ms: float = 0.0  # the round trip to the region
    total_ms: float = 0.0


class WorkerCandidate(msgspec.Struct, gc=False):
    """One way to run one part of the request. `part`: prefill, decode, or local (both on a decode worker).

    pricing.py makes a candidate, and selection.py may set `refused`; nothing changes it after that. The terms
    of its cost are those of `PlacementCost`; they are fields here because one more record would take 0.1 us.
    """

    part: str
    instance: str
    group: Group
    refused: str  # the reason why it may not be used, "" = it may
    total_ms: float
    held_tokens: int  # with KV on the worker itself
    load_tokens: int  # in flight there, as bounded load counts them
    others_ms: float
    transfer_ms: float = 0.0
    decode_queue_ms: float = 0.0
    step_ms: float = 0.0
    uncached_tokens: int = 0  # to compute; 0 for part "decode"
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    load_ms: float = 0.0
    ahead_tokens: int = 0  # computed before this request, of `ahead_requests`
    ahead_requests: int = 0
    longer_tokens: int = 0  # of queued prompts that need more than this one
    last_cold: int = 0
    loaded_tokens: int = 0
    source: str = ""  # where `loaded_tokens` are read: a kvstore, or with `from_peer` a prefill worker
    from_peer: bool = False

    @property
    def cached_tokens(self) -> int:
        """The tokens of the prompt that are not computed."""
        return self.held_tokens + self.loaded_tokens

    @property
    def cost(self) -> PlacementCost:
        """The terms, without the way to the region."""
        return PlacementCost(
            self.queue_ms,
            self.prefill_ms,
            self.load_ms,
            self.transfer_ms,
            self.decode_queue_ms,
            self.step_ms,
            self.others_ms,
            0.0,
            self.total_ms,
        )


class ChoiceReason(msgspec.Struct, frozen=True, gc=False):
    """Why one part of the request runs where it runs. `rule` is one of explanation.py.

    With rule "cost", `term` of `against` exceeds the same term of `chosen` by `difference_ms`, and no other
    term differs more. `against` is the cheapest usable alternative, or a worker that holds more KV.
    """

    part: str  # prefill, decode, local or pair
    chosen: str
    rule: str
    text: str
    against: str = ""
    term: str = ""  # a field of PlacementCost
    difference_ms: float = 0.0


class PlacementDecision(msgspec.Struct, frozen=True, gc=False):
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
    cost: PlacementCost = msgspec.field(default_factory=PlacementCost)
    reasons: tuple[ChoiceReason, ...] = ()
    # The candidates that run the request: prefill and decode, or local alone.
    chosen: tuple[WorkerCandidate, ...] = ()
    # All prefill and decode workers, and decode workers that may compute the prompt as part "local".
    candidates: tuple[WorkerCandidate, ...] = ()
