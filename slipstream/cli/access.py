"""The flags by which a command reaches a cluster, the same for every command of operators.

    @takes_access
    def drain(instance: Instance, access: OperatorAccess) -> None: ...

has the flags of the cluster in the place of `access`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli.options import (
    ClusterSecretFile,
    RunDir,
    TlsCa,
    TlsCertificate,
    TlsKey,
    TlsServerName,
    check_endpoints,
    is_flag,
    read_api_key,
    tls_from,
    warn_of_exposure,
)
from slipstream.errors import InvalidArgument

if TYPE_CHECKING:
    from slipstream.cli.fleet.fleet_client import FleetClient
    from slipstream.rpc.dial import Dial

ROUTER_VARIABLE = "SLIPSTREAM_ROUTER"
Router = Annotated[
    str | None,
    typer.Option(
        envvar=ROUTER_VARIABLE,
        help="HOST:PORT[,HOST:PORT..] of routers' gRPC admin ports (--admin); default: those of the cluster "
        "in --run-dir.",
    ),
]
OperatorKey = Annotated[
    str | None, typer.Option(help="API key of scope operator; env SLIPSTREAM_API_KEY, with --router.")
]
OperatorKeyFile = Annotated[
    Path | None, typer.Option(envvar="SLIPSTREAM_API_KEY_FILE", help="File with that key.")
]


@dataclass(frozen=True, slots=True)
class OperatorAccess:
    """The values of the flags. `routers`: the admin ports that are named, none for the local cluster."""

    run_dir: Path
    routers: tuple[str, ...]
    flags: Mapping[str, Any]

    def dial(self) -> Dial:
        """Opens channels with the operator's credentials. Raises InvalidArgument."""
        from slipstream.operator_access import operator_dial

        flags, secret_file = self.flags, self.flags["cluster_secret_file"]
        if secret_file is not None:
            warn_of_exposure("--cluster-secret-file", secret_file)
        return operator_dial(
            self.run_dir,
            given=secret_file,
            tls=tls_from(
                flags["tls_ca"], flags["tls_certificate"], flags["tls_key"], flags["tls_server_name"]
            ),
            api_key=self._api_key(),
            is_remote=bool(self.routers),
        )

    def _api_key(self) -> str | None:
        """The key of a flag, else of the environment where no flag gives a secret. Raises InvalidArgument."""
        flags = self.flags
        if is_flag("cluster_secret_file"):
            for name, flag in (("api_key", "--api-key"), ("api_key_file", "--api-key-file")):
                if is_flag(name):
                    raise InvalidArgument(f"--cluster-secret-file, {flag}", "are two credentials: give one")
            return None
        return read_api_key(flags["api_key"], flags["api_key_file"], use_file=bool(self.routers))

    def fleet_client(self) -> FleetClient:
        """The fleet through the named routers, else through those of the local cluster. Raises NotFound."""
        from slipstream.cli.fleet.fleet_client import FleetClient
        from slipstream.cluster_record import admin_ports

        return FleetClient(self.routers or admin_ports(self.run_dir), self.dial())


_FLAGS: Mapping[str, tuple[Any, Any]] = {
    "run_dir": (RunDir, Path(".run")),
    "router": (Router, None),
    "api_key": (OperatorKey, None),
    "api_key_file": (OperatorKeyFile, None),
    "cluster_secret_file": (ClusterSecretFile, None),
    "tls_ca": (TlsCa, None),
    "tls_certificate": (TlsCertificate, None),
    "tls_key": (TlsKey, None),
    "tls_server_name": (TlsServerName, ""),
}


def takes_access(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command with the flags in the place of its parameter `access`."""
    return with_flags(command, "access", _FLAGS, _access_of)


def _access_of(flags: Mapping[str, Any]) -> OperatorAccess:
    return OperatorAccess(flags["run_dir"], routers_of(flags), flags)


def routers_of(flags: Mapping[str, Any]) -> tuple[str, ...]:
    """The admin ports that --router or its variable names. Raises InvalidArgument for no host:port."""
    routers = tuple(filter(None, (flags["router"] or "").split(",")))
    check_endpoints(routers, flag="--router")
    return routers


def with_flags(
    command: Callable[..., Any],
    parameter: str,
    shared: Mapping[str, tuple[Any, Any]],
    make: Callable[[Mapping[str, Any]], Any],
) -> Callable[..., Any]:
    """The command with `shared` flags, annotation and default by name, in the place of one parameter.

    `make` gives the parameter's value from those of the flags.
    """
    own = dict(inspect.signature(command, eval_str=True).parameters)
    del own[parameter]

    def call(**given: Any) -> Any:
        flags = {name: given.pop(name) for name in shared}
        return command(**given, **{parameter: make(flags)})

    keyword = inspect.Parameter.KEYWORD_ONLY
    added = [
        inspect.Parameter(name, keyword, default=default, annotation=annotation)
        for name, (annotation, default) in shared.items()
    ]
    parameters = [*(each.replace(kind=keyword) for each in own.values()), *added]
    call.__name__, call.__doc__ = command.__name__, command.__doc__
    call.__annotations__ = {each.name: each.annotation for each in parameters}
    vars(call)["__signature__"] = inspect.Signature(parameters)
    return call
