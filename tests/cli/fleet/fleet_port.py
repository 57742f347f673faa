"""An admin port in a thread: a fleet that the test writes, and processes that can be drained."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from slipstream.enum_names import ROLES
from slipstream.v1 import fleet_pb2, fleet_pb2_grpc, worker_pb2

READY, DRAINING = fleet_pb2.PROCESS_STATE_READY, fleet_pb2.PROCESS_STATE_DRAINING
SILENT = fleet_pb2.PROCESS_STATE_SILENT
WAIT_S = 60.0


def process(role: str, number: int = 0, *, incarnation: str = "1", **load: Any) -> fleet_pb2.FleetProcess:
    """A ready process with this load."""
    report = worker_pb2.LoadReport(**load) if load else None
    return fleet_pb2.FleetProcess(
        role=ROLES.value(role),
        instance=f"{role}-{number}",
        incarnation=incarnation,
        endpoint=f"10.0.0.{number % 250}:7000",
        state=READY,
        load=report,
    )


class FleetPort(fleet_pb2_grpc.FleetServiceServicer):
    """The servicer. `calls` notes (instance, method, message); a drained process is draining afterwards."""

    def __init__(self, *processes: fleet_pb2.FleetProcess) -> None:
        self.processes = {each.instance: each for each in processes}
        self.calls: list[tuple[str, str, bytes]] = []
        self.metadata: dict[str, Any] = {}
        self.endpoint = ""
        self.held = worker_pb2.Ledger()  # what a drained process still holds
        # Of processes whose load differs from that in the fleet.
        self.reports: dict[str, worker_pb2.LoadReport] = {}
        self.ends = True  # whether a process that is to exit does
        self.restarts = True  # whether a process that ends is started again
        self.state_again = READY  # of one that was started again
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._started = threading.Event()

    async def GetFleet(self, request: Any, context: Any) -> fleet_pb2.GetFleetResponse:
        self.metadata = dict(context.invocation_metadata())
        return fleet_pb2.GetFleetResponse(
            router="router-0", model="helper", processes=list(self.processes.values())
        )

    async def CallProcess(
        self, request: fleet_pb2.CallProcessRequest, context: Any
    ) -> AsyncIterator[fleet_pb2.CallProcessResponse]:
        method = request.method.rpartition("/")[2]
        self.calls.append((request.instance, method, request.message))
        named = self.processes[request.instance]
        answer: Any = worker_pb2.UndrainResponse()
        if method == "Undrain":
            named.state = READY
        elif method == "GetStatus":
            if named.state == SILENT:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses")
            answer = self._status_of(named)
        elif worker_pb2.DrainRequest.FromString(request.message).exit:
            answer = worker_pb2.DrainResponse()
            if self.ends and self.restarts:
                named.incarnation, named.state = f"{named.incarnation}+", self.state_again
            elif self.ends:
                del self.processes[request.instance]
        else:
            answer, named.state = worker_pb2.DrainResponse(ledger=self.held), DRAINING
        yield fleet_pb2.CallProcessResponse(message=answer.SerializeToString())

    def _status_of(self, named: fleet_pb2.FleetProcess) -> worker_pb2.GetStatusResponse:
        return worker_pb2.GetStatusResponse(
            role=named.role,
            instance=named.instance,
            load=self.reports.get(named.instance, named.load),
            ledger=self.held,
            uptime_ms=125_000,
            rss_bytes=250_000_000,
            draining=named.state == DRAINING,
            counters={"slipstream_kv_blocks_leaked": 3},
        )

    async def _serve(self, address: str) -> None:
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        fleet_pb2_grpc.add_FleetServiceServicer_to_server(self, server)
        self.endpoint = f"127.0.0.1:{server.add_insecure_port(address)}"
        await server.start()
        self._started.set()
        await self._stop.wait()
        await server.stop(None)

    @contextmanager
    def serving(self, address: str = "127.0.0.1:0") -> Iterator[FleetPort]:
        """Serve inside the block."""
        thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(address),))
        thread.start()
        assert self._started.wait(WAIT_S)
        try:
            yield self
        finally:
            self._loop.call_soon_threadsafe(self._stop.set)
            thread.join(WAIT_S)
