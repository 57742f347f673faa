"""KEDA's external scaler: one metric for each tier, whose total is the replicas that the load wants.

The metric's target is 1 for each replica and never changes, so that HPA's ceil(total / target) is the
recommendation. HPA keeps the present size while total / (replicas * target) is within 10 % of 1.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from libs.common.cluster.worker_record import Role
from services.router.autoscale.decision import is_active, recommend
from services.router.autoscale.signals import FleetSignals
from services.router.autoscale.types import AutoscalePolicy
from slipstream.bound import shown
from slipstream.errors import InvalidArgument
from slipstream.keda import externalscaler_pb2 as keda
from slipstream.keda import externalscaler_pb2_grpc

SERVICE_NAME = "externalscaler.ExternalScaler"
METHODS = frozenset(
    f"/{SERVICE_NAME}/{method}" for method in ("IsActive", "StreamIsActive", "GetMetricSpec", "GetMetrics")
)
TARGET = 1
_CHECK_S = 0.25

_Context = grpc.aio.ServicerContext[Any, Any]


def metric_name(role: Role) -> str:
    """The name of a tier's metric. HPAs refer to it: it never changes."""
    return f"slipstream-{role}-replicas"


class KedaScaler(externalscaler_pb2_grpc.ExternalScalerServicer):
    """The servicer. Method names are KEDA's."""

    def __init__(self, signals: FleetSignals, policy: AutoscalePolicy) -> None:
        self._signals = signals
        self._policy = policy

    async def IsActive(self, request: keda.ScaledObjectRef, context: _Context) -> keda.IsActiveResponse:
        return keda.IsActiveResponse(result=is_active(self._signals.loads(), _tier_of(request)))

    async def StreamIsActive(
        self, request: keda.ScaledObjectRef, context: _Context
    ) -> AsyncIterator[keda.IsActiveResponse]:
        role = _tier_of(request)
        before: bool | None = None
        while True:
            active = is_active(self._signals.loads(), role)
            if active is not before:
                before = active
                yield keda.IsActiveResponse(result=active)
            await asyncio.sleep(_CHECK_S)

    async def GetMetricSpec(
        self, request: keda.ScaledObjectRef, context: _Context
    ) -> keda.GetMetricSpecResponse:
        name = metric_name(_tier_of(request))
        spec = keda.MetricSpec(metricName=name, targetSize=TARGET, targetSizeFloat=float(TARGET))
        return keda.GetMetricSpecResponse(metricSpecs=[spec])

    async def GetMetrics(self, request: keda.GetMetricsRequest, context: _Context) -> keda.GetMetricsResponse:
        role = _tier_of(request.scaledObjectRef)
        name = metric_name(role)
        if request.metricName not in ("", name):
            raise InvalidArgument("metricName", f"must be {name}, not {shown(request.metricName)}")
        found = recommend(self._signals.loads(), role, self._policy)
        value = keda.MetricValue(
            metricName=name, metricValue=found.wanted, metricValueFloat=found.bounded_load
        )
        return keda.GetMetricsResponse(metricValues=[value])


def _tier_of(reference: keda.ScaledObjectRef) -> Role:
    """The tier of the trigger's metadata. Raises InvalidArgument."""
    tier = reference.scalerMetadata.get("tier", "")
    try:
        return Role(tier)
    except ValueError:
        raise InvalidArgument("tier", f"must be one of {', '.join(Role)}, not {shown(tier)}") from None
