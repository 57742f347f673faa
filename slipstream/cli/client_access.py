"""The flags by which a command calls a cluster as a client, the same for `chat`, `jobs` and `usage`.

    @takes_client
    def usage(access: ClientAccess) -> None: ...

has the flags of a client in the place of `access`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli.access import ROUTER_VARIABLE, routers_of, with_flags
from slipstream.cli.options import (
    RunDir,
    TlsCa,
    TlsCertificate,
    TlsKey,
    TlsServerName,
    check_endpoints,
    read_api_key,
    tls_from,
)
from slipstream.cli.run_async import run_async
from slipstream.errors import InvalidArgument, NotFound

if TYPE_CHECKING:
    from slipstream.client import Client
    from slipstream.rpc.tls import TlsFiles
    from slipstream.v1 import fleet_pb2

Endpoint = Annotated[
    str | None,
    typer.Option(help="host:port of a router's port for clients, or of several; comes before --router."),
]
Router = Annotated[
    str | None,
    typer.Option(
        envvar=ROUTER_VARIABLE,
        help="HOST:PORT[,HOST:PORT..] of routers' gRPC admin ports (--admin), which name the ports for "
        "clients to a key of scope operator; default: the cluster in --run-dir.",
    ),
]
ApiKey = Annotated[
    str | None, typer.Option(envvar="SLIPSTREAM_API_KEY", help="Key of a tenant or an operator.")
]
ApiKeyFile = Annotated[
    Path | None, typer.Option(envvar="SLIPSTREAM_API_KEY_FILE", help="File with that key.")
]

_FLAGS: Mapping[str, tuple[Any, Any]] = {
    "run_dir": (RunDir, Path(".run")),
    "endpoint": (Endpoint, None),
    "router": (Router, None),
    "api_key": (ApiKey, None),
    "api_key_file": (ApiKeyFile, None),
    "tls_ca": (TlsCa, None),
    "tls_certificate": (TlsCertificate, None),
    "tls_key": (TlsKey, None),
    "tls_server_name": (TlsServerName, ""),
}


@dataclass(frozen=True, slots=True)
class ClientAccess:
    """The values of the flags. `routers`: admin ports that name the routers, if no `endpoint` does.

    Without either it is the router of the cluster in `run_dir`.
    """

    run_dir: Path
    endpoint: str | None = None
    api_key: str | None = None
    tls: TlsFiles | None = None
    routers: tuple[str, ...] = ()

    def router(self) -> tuple[str, TlsFiles | None]:
        """The router's host:port, or those of several, and the files of the connection.

        Raises NotFound where no cluster runs, or no router of it, InvalidArgument where its routers want
        another certificate, and what an admin port answers.
        """
        from slipstream.cluster_record import read_record

        if self.endpoint is not None:
            return self.endpoint, self.tls
        if self.routers:
            return run_async(self._ask_routers()), self.tls
        record = read_record(self.run_dir, instead="--router or --endpoint HOST:PORT")
        if record.client_ca and self.tls is None:
            raise InvalidArgument(
                "--tls-certificate",
                f"the routers take certificates of {record.client_ca} only: give one with --tls-ca, "
                "--tls-certificate and --tls-key, or SLIPSTREAM_TLS_CA, _CERTIFICATE and _KEY",
            )
        endpoints = [router.endpoint for router in record.ready_routers()]
        return ",".join(endpoints), self.tls or record.tls_files()

    async def _ask_routers(self) -> str:
        """The ports for clients of the routers that are ready, as the admin ports name them."""
        import asyncio

        from slipstream.cli.fleet.fleet_client import FleetClient
        from slipstream.cli.port_error import CLIENTS_CREDENTIAL
        from slipstream.operator_access import operator_dial

        dial = operator_dial(tls=self.tls, api_key=self.api_key, is_remote=True)
        clients = [FleetClient([router], dial, credential=CLIENTS_CREDENTIAL) for router in self.routers]
        answers = await asyncio.gather(*(client.get() for client in clients), return_exceptions=True)
        fleets = [answer for answer in answers if not isinstance(answer, BaseException)]
        if not fleets:
            raise next(answer for answer in answers if isinstance(answer, BaseException))
        found = [at for fleet in fleets for at in client_endpoints(fleet, is_verified=self.tls is not None)]
        if not found:
            raise NotFound(f"{self.routers[0]} names no router that is ready for clients: give --endpoint")
        return ",".join(dict.fromkeys(found))  # the processes of a router share its ports

    def open(self) -> Client:
        """A client of that router. Raises as `router` does."""
        from slipstream.client import Client

        endpoint, tls = self.router()
        return Client(endpoint, api_key=self.api_key, tls=tls)


def client_endpoints(fleet: fleet_pb2.GetFleetResponse, *, is_verified: bool) -> list[str]:
    """The ports for clients of the ready routers that may get an API key.

    A router knows its own port, and the others' from etcd. Without certificates, which verify who answers, a
    false record there would get the key: only the port of the router that answered counts then.
    """
    from slipstream.v1 import fleet_pb2

    routers = [each for each in fleet.processes if each.client_endpoint]
    own = {each.client_endpoint for each in routers if each.instance == fleet.router}
    ready = [each.client_endpoint for each in routers if each.state == fleet_pb2.PROCESS_STATE_READY]
    return [endpoint for endpoint in ready if is_verified or endpoint in own]


def takes_client(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command with the flags in the place of its parameter `access`."""
    return with_flags(command, "access", _FLAGS, _access_of)


def _access_of(flags: Mapping[str, Any]) -> ClientAccess:
    endpoint: str | None = flags["endpoint"]
    check_endpoints(endpoint.split(",") if endpoint else ())
    tls = tls_from(flags["tls_ca"], flags["tls_certificate"], flags["tls_key"], flags["tls_server_name"])
    key = read_api_key(flags["api_key"], flags["api_key_file"])
    routers = () if endpoint else routers_of(flags)  # a variable that nothing reads may be wrong
    return ClientAccess(flags["run_dir"], endpoint or None, key, tls, routers)
