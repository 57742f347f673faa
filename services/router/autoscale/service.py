"""AutoscaleService: the recommendations with their reasons, and what a scale-down would lose."""

from __future__ import annotations

from typing import Any

import grpc

from services.router.autoscale.decision import prefill_per_decode, recommend_all
from services.router.autoscale.removal import WorkerHoldings, deletion_cost, removal_order
from services.router.autoscale.signals import FleetSignals
from services.router.autoscale.types import AutoscalePolicy, Recommendation
from slipstream.enum_names import ROLES
from slipstream.v1 import autoscale_pb2, autoscale_pb2_grpc

SERVICE_NAME = "slipstream.v1.AutoscaleService"


class AutoscaleService(autoscale_pb2_grpc.AutoscaleServiceServicer):
    """The servicer."""

    def __init__(self, signals: FleetSignals, policy: AutoscalePolicy) -> None:
        self._signals = signals
        self._policy = policy

    async def GetRecommendations(
        self,
        request: autoscale_pb2.GetRecommendationsRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> autoscale_pb2.GetRecommendationsResponse:
        found = recommend_all(self._signals.loads(), self._policy)
        losses = [_loss(holdings) for holdings in removal_order(await self._signals.holdings())]
        return autoscale_pb2.GetRecommendationsResponse(
            tiers=[_tier(each) for each in found],
            prefill_per_decode=prefill_per_decode(found),
            losses=losses,
        )


def _tier(found: Recommendation) -> autoscale_pb2.TierRecommendation:
    return autoscale_pb2.TierRecommendation(
        role=ROLES.value(found.role),
        replicas=found.replicas,
        wanted_replicas=found.wanted,
        min_replicas=found.limits.least,
        max_replicas=found.limits.most,
        signal=autoscale_pb2.AutoscaleSignal.Value(f"AUTOSCALE_SIGNAL_{found.signal.name.upper()}"),
        value=found.signal.value,
        target=found.signal.target,
        reason=found.reason,
        active=found.active,
    )


def _loss(holdings: WorkerHoldings) -> autoscale_pb2.RemovalLoss:
    return autoscale_pb2.RemovalLoss(
        role=ROLES.value(holdings.role),
        instance=holdings.instance,
        endpoint=holdings.endpoint,
        lost_tokens=holdings.lost_tokens,
        sessions=holdings.sessions,
        requests=holdings.requests,
        unique_blocks=holdings.unique_blocks,
        deletion_cost=deletion_cost(holdings),
    )
