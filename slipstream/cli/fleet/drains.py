"""`slipstream drain`, `undrain` and `restart` of processes that a router's admin port reaches.

A process that was drained over gRPC runs on and takes no work, because a process manager starts one again
that has ended. A restart makes the process end, and waits for the next one of its name.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import grpc

from slipstream.cli.fleet.fleet_client import FleetClient, key_of
from slipstream.cli.fleet.restart_waves import restart_waves, skipped_line
from slipstream.cli.port_error import port_error
from slipstream.enum_names import ROLES
from slipstream.errors import DeadlineExceeded, Unavailable
from slipstream.rpc.dial import OpenChannel
from slipstream.v1 import fleet_pb2, worker_pb2, worker_pb2_grpc

_POLL_S = 0.5
_CALL_S = 10.0


async def drain(client: FleetClient, name: str, *, timeout_s: float) -> None:
    """Let the process take no new work; returns when it holds nothing. Raises DeadlineExceeded."""
    began_s = time.monotonic()
    process = await client.find(name)
    await drain_process(client, process, timeout_s=timeout_s)
    print(
        f"drained {process.instance} in {time.monotonic() - began_s:.1f} s; "
        "it runs on and takes no work until `slipstream undrain` or `restart`",
        flush=True,
    )


async def undrain(client: FleetClient, name: str, *, timeout_s: float) -> None:
    """Let a drained process take work again. Raises what the process answers."""
    process = await client.find(name)
    await undrain_process(client, process, timeout_s=timeout_s)
    print(f"{process.instance} takes work", flush=True)


async def drain_process(client: FleetClient, process: fleet_pb2.FleetProcess, *, timeout_s: float) -> None:
    """Drain like `drain`, and print nothing."""
    response = await _call_drain(client, process, worker_pb2.DrainRequest(), timeout_s=timeout_s)
    held = {field.name: value for field, value in response.ledger.ListFields()}
    if held:
        listed = ", ".join(f"{count} {what}" for what, count in held.items())
        raise DeadlineExceeded(
            f"{process.instance} takes no new work, and holds {listed} after {timeout_s:g} s"
        )


async def undrain_process(client: FleetClient, process: fleet_pb2.FleetProcess, *, timeout_s: float) -> None:
    """Undrain like `undrain`, and print nothing."""
    await undrain_at(key_of(process), client.process_dial(), timeout_s=timeout_s)


async def undrain_at(endpoint: str, dial: OpenChannel, *, timeout_s: float) -> None:
    """Let the process behind an endpoint take work again. Raises what it answers."""
    async with dial(endpoint) as channel:
        stub: worker_pb2_grpc.WorkerServiceAsyncStub = worker_pb2_grpc.WorkerServiceStub(channel)
        try:
            await stub.Undrain(worker_pb2.UndrainRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise port_error(error) from None


async def restart(client: FleetClient, name: str | None, *, timeout_s: float) -> None:
    """One process, or all of them but those that are drained.

    Of all, one of each tier restarts at a time, and is ready again before the next ones end.
    """
    if name is not None:
        await _restart(client, [await client.find(name)], timeout_s=timeout_s)
        return
    processes = (await client.get()).processes
    for wave in restart_waves((ROLES.name(process.role), key_of(process)) for process in processes):
        now = {key_of(process): process for process in (await client.get()).processes}
        there = [now[key] for key in wave if key in now]  # others have left meanwhile
        drained = [process for process in there if process.state == fleet_pb2.PROCESS_STATE_DRAINING]
        for process in drained:
            print(skipped_line(process.instance), flush=True)
        left = [process for process in there if process not in drained]
        await _restart(client, left, timeout_s=timeout_s)


async def _restart(
    client: FleetClient, processes: Sequence[fleet_pb2.FleetProcess], *, timeout_s: float
) -> None:
    began_s = time.monotonic()
    # The router that passes the calls on ends last of a wave.
    ends = sorted(processes, key=lambda process: process.instance == client.fleet.router)
    for process in ends:
        await _call_drain(client, process, worker_pb2.DrainRequest(exit=True), timeout_s=_CALL_S)
    for process in ends:
        await _wait_back(client, process, until_s=began_s + timeout_s, timeout_s=timeout_s)
        print(f"restarted {process.instance} in {time.monotonic() - began_s:.1f} s", flush=True)


async def _call_drain(
    client: FleetClient,
    process: fleet_pb2.FleetProcess,
    request: worker_pb2.DrainRequest,
    *,
    timeout_s: float,
) -> worker_pb2.DrainResponse:
    async with client.process_dial()(key_of(process)) as channel:
        stub: worker_pb2_grpc.WorkerServiceAsyncStub = worker_pb2_grpc.WorkerServiceStub(channel)
        try:
            return await stub.Drain(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise port_error(error) from None


async def _wait_back(
    client: FleetClient, process: fleet_pb2.FleetProcess, *, until_s: float, timeout_s: float
) -> None:
    """Return when another run of the process is ready. Raises DeadlineExceeded that says how far it came."""
    seen = "does not answer: no router does"
    while time.monotonic() < until_s:
        try:
            fleet = await client.get()
        except (
            Unavailable,
            DeadlineExceeded,
        ) as error:  # the router that is asked may be the one that restarts
            seen = f"is not seen: {error.message}"
        else:
            same = [each for each in fleet.processes if key_of(each) == key_of(process)]
            if any(_is_back(each, process) for each in same):
                return
            seen = _how_far(same, process)
        await asyncio.sleep(_POLL_S)
    raise DeadlineExceeded(f"{process.instance} {seen} (after {timeout_s:g} s)")


def _is_back(now: fleet_pb2.FleetProcess, before: fleet_pb2.FleetProcess) -> bool:
    return now.incarnation != before.incarnation and now.state == fleet_pb2.PROCESS_STATE_READY


def _how_far(same: Sequence[fleet_pb2.FleetProcess], before: fleet_pb2.FleetProcess) -> str:
    if not same:
        return (
            "has ended and is not back: a process manager must start it again, such as `slipstream up`, "
            "a pod of Kubernetes, or a unit of systemd with Restart=always"
        )
    if same[0].incarnation == before.incarnation:
        return "still runs: it has requests to end, at most for its --drain-s"
    return "was started again and is not ready"
