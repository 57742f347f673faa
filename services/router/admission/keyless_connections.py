"""Ends gRPC connections beyond the share of an address, as long as they show no key."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from libs.common.service_bounds import GRPC_KEYLESS_CHECK_S
from libs.common.telemetry.counters import Counters
from libs.common.telemetry.paced_warnings import PacedWarnings
from services.router.admission.accepted_sockets import AcceptedSockets, Address, n_files
from services.router.admission.grpc_connections import GrpcConnections

log = logging.getLogger(__name__)


async def end_keyless(connections: GrpcConnections, counters: Counters, *, listen: str) -> None:
    """Look at the connections that were accepted at HOST:PORT until cancelled."""
    warnings = PacedWarnings(log)
    accepted = await asyncio.to_thread(AcceptedSockets, listen)
    try:
        while True:
            await asyncio.sleep(GRPC_KEYLESS_CHECK_S)
            clients = await asyncio.to_thread(_clients_of, accepted, connections.most_address)
            excess = connections.keyless_excess(clients)
            if not excess:
                continue
            await asyncio.to_thread(accepted.shut_down, excess)
            counters.add("slipstream_grpc_connections_refused_total", len(excess))
            for host in sorted({host for host, _ in excess}):
                warnings.warn(
                    host, f"{host} has too many gRPC connections without a key; the newest are closed"
                )
    finally:
        accepted.close()


def _clients_of(accepted: AcceptedSockets, most: int) -> Sequence[Address]:
    """The clients. Fewer files cannot be more connections than one address may have."""
    return accepted.clients() if n_files() > most else ()
