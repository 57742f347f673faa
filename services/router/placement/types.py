"""What placement weighs and what it decides. Pure.

One request makes some two hundred of these records. `gc=False` keeps them out of garbage collection: no
record refers to one that refers back.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from services.router.placement.cost_model import DecodeModel, PrefillModel


class HeldTokens(msgspec.Struct, frozen=True, gc=False):
    """The leading tokens of a prompt whose KV a kvstore holds: `dram_tokens` of them in memory."""

    tokens: int = 0
    dram_tokens: int = 0


class PlacementRequest(msgspec.Struct, frozen=True, gc=False):
    """What placement needs to know of a request.

    The `held` maps give, by instance, how many leading tokens of the prompt have KV there. They may be
    wrong, which costs time. `prefill_held` counts also what a worker is about to hold, `prefill_told` only
    what it has said that it holds (workers that are not in it: all), and `prefill_lent` what of that can be
    read there. `content_key` spreads what no kvstore holds yet, so that equal prompts meet.
    """

    prompt_tokens: int
    seed: int = 0
    fingerprint: str = ""  # only workers of the same may run it
    output_tokens: int = 256  # expected
    prefill_held: Mapping[str, int] = msgspec.field(default_factory=dict)
    prefill_told: Mapping[str, int] = msgspec.field(default_factory=dict)
    prefill_lent: Mapping[str, int] = msgspec.field(default_factory=dict)
    decode_held: Mapping[str, int] = msgspec.field(default_factory=dict)
    store_held: Mapping[str, HeldTokens] = msgspec.field(default_factory=dict)
    content_key: bytes = b""
    pinned_prefill: str = ""
    may_skip_prefill: bool = False  # the decode worker may compute the prompt


class PrefillWorker(msgspec.Struct, frozen=True, gc=False):
    """One prefill worker. `refused`: why it may not be used now ("" = it may).

    `queued_tokens` of `queued_requests` were sent to it, by any router, and are not computed yet. Of some of
    these requests, this router's own, `queue` has the tokens one by one.
    `known` is False while its reports are stale: then only this router's own counts are in them.
    """

    instance: str
    fingerprint: str = ""
    transport: str = ""
    region: str = ""
    refused: str = ""
    known: bool = True
    queued_tokens: int = 0
    queued_requests: int = 0
    queue: tuple[int, ...] = ()
    cold_turn: int = 0  # when it last got a cold request, counted by this router; 0 = never
    model: PrefillModel = msgspec.field(default_factory=PrefillModel)


class DecodeWorker(msgspec.Struct, frozen=True, gc=False):
    """One decode worker; see PrefillWorker. `context_tokens` are those of its `sequences`.

    `queued_tokens`: prompts that it computes itself. `free_blocks`: pages free or evictable, None = unknown.
    """

    instance: str
    fingerprint: str = ""
    transport: str = ""
    region: str = ""
    refused: str = ""
    known: bool = True
    context_tokens: int = 0
    sequences: int = 0
    queued_tokens: int = 0
    free_blocks: int | None = None
    max_sequences: int = 0  # 0 = unknown
    block_tokens: int = 64
    block_bytes: int = 0  # 0 = unknown
    model: DecodeModel = msgspec.field(default_factory=DecodeModel)
    prefill_model: PrefillModel = msgspec.field(default_factory=PrefillModel)


class KvStore(msgspec.Struct, frozen=True, gc=False):
    """One kvstore node."""

    instance: str
    transport: str = ""
    region: str = ""
    refused: str = ""


class PlacementFleet(msgspec.Struct, frozen=True, gc=False):
    """The workers at one moment. `region_ms`: the way from this router to a region; 0 where not named."""

    prefill: tuple[PrefillWorker, ...] = ()
    decode: tuple[DecodeWorker, ...] = ()
    stores: tuple[KvStore, ...] = ()
    region_ms: Mapping[str, float] = msgspec.field(default_factory=dict)


class Cost(msgspec.Struct, frozen=True, gc=False):
    """Predicted milliseconds, term by term."""

    queue_ms: float = 0.0  # until what was sent before, and is served before, is computed
    prefill_ms: float = 0.0  # computing what is not held
    load_ms: float = 0.0  # restoring what a kvstore or another prefill worker holds
    transfer_ms: float = 0.0  # KV from prefill to decode
    decode_queue_ms: float = 0.0  # until there are pages and a place in the batch
    step_ms: float = 0.0  # own time per token, weighted
    others_ms: float = 0.0  # delay of others: of prompts that it goes before, of tokens in the batch
    region_ms: float = 0.0  # the way to another region

    @property
    def total_ms(self) -> float:
        """What is compared."""
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
        """Term by term."""
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
    """One way to run one part of the request: `part` is prefill, decode, or local (both on decode)."""

    part: str
    instance: str
    cost: Cost
    held_tokens: int = 0  # on the worker itself
    source: str = ""  # what `loaded_tokens` come from: a kvstore, or with `from_peer` a prefill worker
    from_peer: bool = False
    loaded_tokens: int = 0
    ahead_tokens: int = 0  # to be computed there before it, of `ahead_requests`
    ahead_requests: int = 0
    longer_tokens: int = 0  # of prompts there that need more
    uncached_tokens: int = 0  # to compute; 0 for a decode leg
    load_tokens: int = 0  # in flight there
    group: tuple[str, str] = ("", "")  # transport, region
    cold_turn: int = 0
    refused: str = ""


class PlacementDecision(msgspec.Struct, frozen=True, gc=False):
    """Where to run. `prefill` "": the decode worker computes the prompt itself.

    `kvstore` is where KV comes from and new blocks go to; `peer`, a prefill worker, is to be read first.
    `source` names the one that is expected to hold something of use, or says "worker" or "nothing".
    `cached_tokens` need not be computed, as predicted.
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
    cost: Cost = msgspec.field(default_factory=Cost)
    legs: tuple[WorkerCandidate, ...] = ()
