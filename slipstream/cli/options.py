"""Flags that several commands share: the run directory, JSON output, mutual TLS.

Errors name a value by where it comes from: its flag, or the variable of the environment that gave it.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from slipstream.credentials.bounded_file import read_bounded_text
from slipstream.credentials.secret_files import exposure
from slipstream.errors import FailedPrecondition, InvalidArgument

if TYPE_CHECKING:
    from slipstream.rpc.tls import TlsFiles

RunDir = Annotated[Path, typer.Option(help="Directory of the cluster's state, logs and data.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
TlsCa = Annotated[
    Path | None, typer.Option(envvar="SLIPSTREAM_TLS_CA", help="PEM of the CA; with the two below: mTLS.")
]
TlsCertificate = Annotated[
    Path | None, typer.Option(envvar="SLIPSTREAM_TLS_CERTIFICATE", help="PEM of this client's certificate.")
]
TlsKey = Annotated[Path | None, typer.Option(envvar="SLIPSTREAM_TLS_KEY", help="PEM of its key.")]
TlsServerName = Annotated[
    str,
    typer.Option(
        envvar="SLIPSTREAM_TLS_SERVER_NAME",
        help="Name in the servers' certificates; default: the host that is dialled.",
    ),
]

ClusterSecretFile = Annotated[
    Path | None,
    typer.Option(
        envvar="SLIPSTREAM_CLUSTER_SECRET_FILE",
        help="File with the cluster's secret; default: that of the cluster in --run-dir.",
    ),
]


Instance = Annotated[str, typer.Argument(help="Name of a process, such as decode-0 or decode/decode-0.")]
StatusInstance = Annotated[
    str | None,
    typer.Argument(help="Name of one process, to show what it holds too: a router asks it."),
]
# What a command may wait: long enough for a call, and no deadline beyond those that gRPC takes.
_SHORTEST_WAIT_S, _LONGEST_WAIT_S = 0.1, 86_400.0


def seconds_option(
    help: str, *names: str, least_s: float = _SHORTEST_WAIT_S, most_s: float = _LONGEST_WAIT_S
) -> Any:
    """A flag that takes a time of this range, and refuses others by its name: nan and inf, too."""

    def check(value_s: float) -> float:
        if not least_s <= value_s <= most_s:
            raise typer.BadParameter(f"must be {least_s:g} to {most_s:,.0f} seconds, not {value_s:g}")
        return value_s

    return typer.Option(*names, callback=check, help=help)


# Defaults of the two below.
DRAIN_S, UNDRAIN_S = 150.0, 90.0
DrainTimeoutS = Annotated[float, seconds_option("Give up when it has not ended by then.", "--timeout-s")]
UndrainTimeoutS = Annotated[float, seconds_option("Give up when it is not back by then.", "--timeout-s")]
RestartTimeoutS = Annotated[float, seconds_option("Give up when one is not back by then.", "--timeout-s")]
Rolling = Annotated[
    bool,
    typer.Option(
        help="Restart every process, one of each tier at a time, and leave drained ones as they are. "
        "With two routers no request fails."
    ),
]


def check_endpoints(endpoints: Iterable[str], *, flag: str = "--endpoint") -> None:
    """Raises InvalidArgument for a value of the flag that is not host:port."""
    from slipstream.rpc.hosts import address_of

    for endpoint in endpoints:
        try:
            address_of(endpoint.strip())
        except ValueError:
            raise InvalidArgument(flag, f"must be host:port, not {endpoint!r}") from None


def warn_of_exposure(flag: str, file: Path) -> None:
    """Say on stderr that others may read a file of a secret, by the source of the flag's value."""
    if text := exposure(file):
        command = _running.get()
        source = flag if command is None else _by_source(command, flag)
        print(f"slipstream: {source}: {text}", file=sys.stderr)


def check_one_process(endpoints: Iterable[str] | None) -> None:
    """Raises InvalidArgument where --endpoint names a process beside its name."""
    if endpoints:
        raise InvalidArgument("--endpoint", "and the name of a process are two ways to say which: give one")


def check_which(name: str | None, *, rolling: bool) -> None:
    """Raises FailedPrecondition unless a restart is of one process or of all."""
    if rolling == (name is not None):
        raise FailedPrecondition("needs the name of one process or --rolling, and not both")


def read_api_key(key: str | None, file: Path | None, *, use_file: bool = True) -> str | None:
    """The key, else that of the file if `use_file`. Raises InvalidArgument for a file without one."""
    if key or file is None or not use_file:
        return key
    return _word_of(file, "--api-key-file", "key")


def read_secret(variable: str, file: Path | None, flag: str) -> str:
    """The secret of the file, else that of the environment; "" without both.

    No flag takes it itself: every process of a machine can read the arguments of others. Raises
    InvalidArgument for a file that cannot be read or holds no single word.
    """
    return os.environ.get(variable, "") if file is None else _word_of(file, flag, "secret")


def _word_of(file: Path, flag: str, noun: str) -> str:
    """The only word of a file. Raises InvalidArgument."""
    warn_of_exposure(flag, file)
    try:
        text = read_bounded_text(file).strip()
    except ValueError as error:
        raise InvalidArgument(flag, str(error)) from None
    if len(text.split()) != 1:
        raise InvalidArgument(flag, f"{file} must hold one {noun} and nothing else")
    return text


def tls_from(
    ca: Path | None, certificate: Path | None, key: Path | None, server_name: str = ""
) -> TlsFiles | None:
    """TLS files of three flags; None without any of them.

    Raises InvalidArgument for one or two, and for what cannot be used.
    """
    if ca is None and certificate is None and key is None:
        return None
    if ca is None or certificate is None or key is None:
        raise InvalidArgument("--tls-ca, --tls-certificate, --tls-key", "go together")
    from slipstream.credentials.certificates import TlsFault
    from slipstream.rpc.tls import TlsFiles

    files = TlsFiles(ca, certificate, key, server_name)
    try:
        files.check()
    except TlsFault as fault:
        raise fault.as_argument("--tls-{}".format) from None
    warn_of_exposure("--tls-key", key)
    return files


# The context of the command that runs: it has the sources of the flags' values.
_running: ContextVar[Any] = ContextVar("command", default=None)


class SourceCommand(TyperCommand):
    """A command whose numbers are finite.

    Its errors name the variable, and not the flag, of a value that a variable gave.
    """

    def invoke(self, ctx: Any) -> Any:
        """Run the command. Raises what it raises, with the fields of InvalidArgument by their sources."""
        _check_finite(ctx)
        before = _running.set(ctx)
        try:
            return super().invoke(ctx)
        except InvalidArgument as error:
            field = _by_source(ctx, error.field)
            if field == error.field:
                raise
            raise type(error)(field, error.reason) from None
        finally:
            _running.reset(before)


def _check_finite(ctx: Any) -> None:
    """Raises BadParameter for the first flag of a number that is nan, which no range excludes, or inf."""
    for parameter in ctx.command.params:
        value = ctx.params.get(parameter.name)
        if isinstance(value, float) and not math.isfinite(value):
            raise typer.BadParameter(f"must be a finite number, not {value}", ctx=ctx, param=parameter)


def is_flag(name: str) -> bool:
    """Whether the arguments of the command that runs have this parameter, and not the environment alone."""
    ctx = _running.get()
    return getattr(ctx and ctx.get_parameter_source(name), "name", "") == "COMMANDLINE"


def name_sources(app: typer.Typer) -> None:
    """Let all commands of the app, and of the apps below it, be of this class."""
    for command in app.registered_commands:
        command.cls = SourceCommand
    for group in app.registered_groups:
        if group.typer_instance is not None:
            name_sources(group.typer_instance)


def _by_source(ctx: Any, field: str) -> str:
    """The field, which is a flag or a list of flags, with the variables of those that variables gave."""
    variables = {
        flag: parameter.envvar
        for parameter in ctx.command.params
        if getattr(ctx.get_parameter_source(parameter.name), "name", "") == "ENVIRONMENT"
        for flag in parameter.opts
    }
    return ", ".join(variables.get(flag, flag) for flag in field.split(", "))
