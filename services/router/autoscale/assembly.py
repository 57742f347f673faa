"""Serves the recommendations of a router on its admin port: to operators, and to KEDA."""

from __future__ import annotations

from collections.abc import Sequence

from libs.common.rpc.serve import ServiceHost
from services.router.autoscale import scaler, service
from services.router.autoscale.signals import FleetSignals
from services.router.autoscale.types import AutoscalePolicy
from slipstream.keda import externalscaler_pb2_grpc
from slipstream.v1 import autoscale_pb2_grpc


def add_autoscale(admin: ServiceHost, signals: FleetSignals, policy: AutoscalePolicy) -> Sequence[str]:
    """The names of the services."""
    autoscale_pb2_grpc.add_AutoscaleServiceServicer_to_server(
        service.AutoscaleService(signals, policy), admin.server
    )
    externalscaler_pb2_grpc.add_ExternalScalerServicer_to_server(
        scaler.KedaScaler(signals, policy), admin.server
    )
    return service.SERVICE_NAME, scaler.SERVICE_NAME
