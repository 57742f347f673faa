"""Learning from a first token: each prompt token counts once, as computed or for its KV source."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from services.router.execution.attempt_types import TokenBatch
from services.router.execution.dispatcher import Assignment
from services.router.placement.policy import place
from services.router.placement.types import DecodeWorker, PlacementFleet, PlacementRequest, PrefillWorker
from services.router.placement.worker_models import WorkerModels
from slipstream.v1 import common_pb2

PROMPT_TOKENS = 4_096
CACHED_TOKENS = 3_072


@pytest.mark.parametrize(
    ("tier", "rate"),
    [
        (common_pb2.CACHE_TIER_WORKER, None),
        (common_pb2.CACHE_TIER_DRAM, "dram_token_ms"),
        (common_pb2.CACHE_TIER_NVME, "nvme_token_ms"),
        (common_pb2.CACHE_TIER_POOL, "nvme_token_ms"),
        (common_pb2.CACHE_TIER_PEER, "peer_token_ms"),
    ],
)
def test_the_time_of_a_restore_is_learnt_for_its_source(
    tier: common_pb2.CacheTier.ValueType, rate: str | None
) -> None:
    models = WorkerModels()
    before = models.prefill_model("p0")
    links: Any = SimpleNamespace(prefill=SimpleNamespace(key="p0"), decode=SimpleNamespace(key="d0"))
    fleet: Any = SimpleNamespace(worker_models=models)
    decision = place(
        PlacementRequest(PROMPT_TOKENS), PlacementFleet((PrefillWorker("p0"),), (DecodeWorker("d0"),))
    )
    ask: Any = SimpleNamespace(prompt_tokens=PROMPT_TOKENS)
    routed = Assignment(links, decision, ask, 0.0, fleet)
    computed_ms = before.compute_ms(PROMPT_TOKENS - CACHED_TOKENS, PROMPT_TOKENS)
    cached = [common_pb2.CachedTokens(tier=tier, tokens=CACHED_TOKENS)]
    slow_ms = CACHED_TOKENS * 1.0 if rate else 0.0
    for _ in range(100):
        routed.observe(TokenBatch([1], cached=cached, prefill_ms=computed_ms + slow_ms))
    after = models.prefill_model("p0")
    for name in ("dram_token_ms", "nvme_token_ms", "peer_token_ms"):
        if name == rate:  # a part of the time counts for the computed tokens
            assert getattr(after, name) > 1.2 * getattr(before, name)
        else:
            assert getattr(after, name) == pytest.approx(getattr(before, name))
