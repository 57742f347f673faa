"""The processes with metrics as Prometheus reads targets from a file (file_sd).

The supervisor knows the admin port of the first process of a router. The others of `--processes N` take any
free one and announce it in discovery, under the router's name with a number: `router-0.1`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing

from libs.common.cluster.discovery import EtcdDiscovery
from libs.common.cluster.worker_record import Role, Worker
from libs.common.etcd.access import EtcdAccess
from slipstream.cluster_record import ClusterRecord
from supervisor.process_state import ProcessState


async def watch_routers(etcd: EtcdAccess) -> AsyncGenerator[tuple[Worker, ...], None]:
    """Yield the router processes in discovery, those that drain too, now and after each change. Endless."""
    client = etcd.open()
    last: tuple[Worker, ...] | None = None
    try:
        async with aclosing(EtcdDiscovery(client).watch()) as snapshots:
            async for fleet in snapshots:
                routers = tuple(each for each in (*fleet.workers, *fleet.leaving) if each.role is Role.ROUTER)
                if routers != last:
                    last = routers
                    yield routers
    finally:
        await client.close()


def scrape_targets(record: ClusterRecord, routers: Iterable[Worker]) -> list[dict[str, object]]:
    """The processes that are meant to run, and those of `routers` that belong to one of them."""
    found = []
    for process in record.processes:
        if process.admin_http is None or process.state == ProcessState.DRAINED:
            continue
        host = process.admin_http.rpartition(":")[0]
        ports = {process.instance: process.admin_http}
        for each in routers:
            # Prometheus dials what this file names, so a record in etcd gives the port, and not the machine.
            # A process advertises the port that it has, whatever its host is called elsewhere.
            if each.instance.startswith(f"{process.instance}.") and each.admin_http:
                ports[each.instance] = f"{host}:{each.admin_http.rpartition(':')[2]}"
        scheme = record.http_scheme(process.role)
        found += [_target(process.role, *port, scheme=scheme) for port in ports.items()]
    return found


def _target(role: str, instance: str, admin_http: str, *, scheme: str) -> dict[str, object]:
    labels = {"component": role, "process": instance}
    # Prometheus scrapes by HTTP where no label says otherwise.
    return {"targets": [admin_http], "labels": labels | ({"__scheme__": scheme} if scheme != "http" else {})}
