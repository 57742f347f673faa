"""The fleet of a cluster, as the admin port of one of its routers shows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict

from slipstream.cli.fleet.routed_channel import RoutedDial
from slipstream.cli.port_error import OPERATORS_CREDENTIAL, port_error
from slipstream.enum_names import ROLES, EnumNames
from slipstream.errors import InvalidArgument, NotFound, SlipstreamError, Unavailable
from slipstream.rpc.dial import OpenChannel
from slipstream.rpc.rpc_errors import received
from slipstream.v1 import fleet_pb2, fleet_pb2_grpc

ASK_TIMEOUT_S = 5.0

_STATES = EnumNames.of(fleet_pb2.ProcessState, unspecified=None)


def state_name(process: fleet_pb2.FleetProcess) -> str:
    """ready, silent or draining; unknown for a value of a later contract."""
    return _STATES.name(process.state)


def fleet_dict(fleet: fleet_pb2.GetFleetResponse) -> dict[str, Any]:
    """The answer as JSON has it; `load` is null where it is not known."""
    said: dict[str, Any] = MessageToDict(
        fleet, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    for row, process in zip(said["processes"], fleet.processes, strict=True):
        row.update(role=ROLES.name(process.role), state=state_name(process))
        row.setdefault("load", None)
    return said


class FleetClient:
    """Asks the first router that answers. Every call has a new connection: a router may restart."""

    def __init__(
        self, routers: Sequence[str], dial: OpenChannel, *, credential: str = OPERATORS_CREDENTIAL
    ) -> None:
        """`routers`: host:port of admin ports. `credential`: the flags that give one, for errors."""
        self._routers = list(routers)
        self._dial = dial
        self._credential = credential
        self.fleet = fleet_pb2.GetFleetResponse()  # the last answer

    @property
    def router(self) -> str:
        """The admin port that answered last, or that is asked first."""
        return self._routers[0]

    def process_dial(self) -> RoutedDial:
        """Opens channels to processes through that router."""
        return RoutedDial(self.router, self._dial)

    async def get(self, *, timeout_s: float = ASK_TIMEOUT_S) -> fleet_pb2.GetFleetResponse:
        """The fleet now. Raises what the last router answers where none shows it."""
        failure: SlipstreamError = Unavailable("no router is named")
        for router in tuple(self._routers):
            try:
                self.fleet = await self._ask(router, timeout_s)
            except SlipstreamError as error:
                failure = error
                continue
            self._routers.remove(router)
            self._routers.insert(0, router)
            return self.fleet
        raise failure

    async def find(self, name: str) -> fleet_pb2.FleetProcess:
        """The process of that name, or of that "role/name". Raises NotFound, InvalidArgument for a name that
        several tiers have."""
        fleet = await self.get()
        found = [process for process in fleet.processes if name in (process.instance, key_of(process))]
        if not found:
            names = ", ".join(process.instance for process in fleet.processes)
            raise NotFound(f"no process {name!r} in the fleet of {fleet.router}; there are {names}")
        if len(found) > 1:
            raise InvalidArgument(name, f"is the name of several: say {' or '.join(map(key_of, found))}")
        return found[0]

    async def _ask(self, router: str, timeout_s: float) -> fleet_pb2.GetFleetResponse:
        async with self._dial(router) as channel:
            stub: fleet_pb2_grpc.FleetServiceAsyncStub = fleet_pb2_grpc.FleetServiceStub(channel)
            try:
                answer = await stub.GetFleet(fleet_pb2.GetFleetRequest(), timeout=timeout_s)
                return received(answer, sender=router)
            except grpc.aio.AioRpcError as error:
                raise port_error(error, credential=self._credential) from None


def key_of(process: fleet_pb2.FleetProcess) -> str:
    """role/instance, which one process has."""
    return f"{ROLES.name(process.role)}/{process.instance}"
