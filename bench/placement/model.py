"""The parts of the placement simulation: the hardware, a request on its way, percentiles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.placement.trace import TraceRequest
from services.router.placement.cost_model import DecodeModel, PrefillModel

KV_BYTES_PER_TOKEN = 61 * 576 * 2  # Kimi K2.5: 61 layers of 576 values, bfloat16


@dataclass(frozen=True, slots=True)
class Hardware:
    """The hardware of the simulated workers. Defaults: one 8-GPU node a worker, without wide expert
    parallelism; prefill 6.7k tokens/s at short context, a decode step of 12 ms when idle. KV is read from a
    kvstore's memory or from another prefill worker at 17.5 GB/s."""

    n_prefill: int = 8
    n_decode: int = 8
    cache_blocks: int = 4_000  # of each prefill worker; 2 M tokens = 144 GB of K2.5's latents
    store_blocks: int = 0  # of a kvstore that every prefill worker writes to and reads from
    in_order: bool = False  # prefill workers compute one prompt after the other
    decode_tokens: int = 4_000_000  # KV room of each decode worker
    max_sequences: int = 256
    max_waiting: int = 256  # prompts in a prefill worker's line; more are rejected
    prefill: PrefillModel = field(
        default_factory=lambda: PrefillModel(
            request_ms=15.0,
            token_ms=0.15,
            attention_ms=0.00075,
            dram_token_ms=0.004,
            nvme_token_ms=0.02,
            peer_token_ms=0.004,
        )
    )
    decode: DecodeModel = field(
        default_factory=lambda: DecodeModel(
            step_base_ms=12.0, sequence_ms=0.15, context_ms=0.02, pull_ms=2.0, pull_mib_ms=0.04
        )
    )
    noise: float = 0.05

    @property
    def total_blocks(self) -> int:
        """The blocks of all caches together."""
        return self.n_prefill * self.cache_blocks + self.store_blocks


@dataclass(slots=True, eq=False)
class Run:
    """A request on its way."""

    request: TraceRequest
    prefill: int = -1
    decode: int = -1
    cached_tokens: int = 0
    peer: int | None = None  # the prefill worker it reads KV from
    read_tokens: int = 0  # from there, or from the kvstore
    expected_uncached: int = 0  # what the rule counts for it until its turn comes
    takes_ms: float = 0.0  # of the engine; 0 until that turned to it
    left_ms: float = 0.0
    waits_from: float = 0.0  # tokens its worker had computed for others when it could first run
    sent_ms: float = 0.0
    first_token_ms: float = math.inf
    done_ms: float = math.inf
    rejected: bool = False

    @property
    def uncached_tokens(self) -> int:
        """The tokens that a worker must compute."""
        return self.request.prompt_tokens - self.cached_tokens

    @property
    def exact_left(self) -> float:
        """The part of them that is left now."""
        return self.uncached_tokens * max(self.left_ms / self.takes_ms, 0.0)

    @property
    def tokens_left(self) -> int:
        """Expected to be left."""
        return int(self.exact_left) if self.takes_ms else self.expected_uncached

    @property
    def ttft_ms(self) -> float:
        """Time to first token."""
        return self.first_token_ms - self.request.at_ms

    @property
    def tpot_ms(self) -> float:
        """Mean time per token after the first."""
        return (self.done_ms - self.first_token_ms) / max(self.request.output_tokens - 1, 1)


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest-rank percentile; 0 for none."""
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)] if ordered else 0.0
