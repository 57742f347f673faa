"""Commands and their flags. What a command does is imported when it runs, so that `--help` is quick."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from slipstream import __version__
from slipstream.cli.access import OperatorAccess, takes_access
from slipstream.cli.autoscale import autoscale
from slipstream.cli.chat.harmless_text import harmless
from slipstream.cli.client_access import ClientAccess, takes_client
from slipstream.cli.installed_commands import (
    ANY_ARGUMENTS,
    InstalledCommand,
    add_command,
    find_commands,
)
from slipstream.cli.jobs.app import jobs_app
from slipstream.cli.keys import keys_app
from slipstream.cli.kv.app import kv_app
from slipstream.cli.options import (
    DRAIN_S,
    UNDRAIN_S,
    AsJson,
    DrainTimeoutS,
    Instance,
    RestartTimeoutS,
    Rolling,
    StatusInstance,
    UndrainTimeoutS,
    check_endpoints,
    check_one_process,
    check_which,
    name_sources,
)
from slipstream.cli.run_async import run_async
from slipstream.cli.top.command import top
from slipstream.cli.usage import usage
from slipstream.errors import FailedPrecondition, InvalidArgument, SlipstreamError

if TYPE_CHECKING:
    from slipstream.cli.fleet.fleet_client import FleetClient

# Typer does not export the class of all refused arguments.
_USAGE_ERROR = cast("type[Exception]", typer.BadParameter.__mro__[1])
# What slipstream-server adds.
_SERVER_COMMANDS = ("up", "down", "kill", "route", "config")


def run() -> None:
    """Run the command line. An error ends it with one line: exit code 2 for wrong arguments, else 1."""
    _show_log()
    try:
        code = app(standalone_mode=False, prog_name="slipstream")
    except SlipstreamError as error:
        print(harmless(f"slipstream: {error.message}"), file=sys.stderr)
        raise SystemExit(1) from None
    except typer.Abort:
        print("\nslipstream: aborted", file=sys.stderr)
        raise SystemExit(1) from None
    except _USAGE_ERROR as error:
        raise SystemExit(_show_usage_error(error)) from None
    raise SystemExit(code if isinstance(code, int) else 0)


class _CommandLine(logging.Formatter):
    """What a library logs as a line like those of commands."""

    def format(self, record: logging.LogRecord) -> str:
        return harmless(f"slipstream: {super().format(record)}")


def _show_log() -> None:
    """Show warnings and errors of libraries on stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(_CommandLine())
    logging.basicConfig(handlers=[handler])


def _show_usage_error(error: Any) -> int:
    """One line, or the help where a group of commands was called without any."""
    message = error.format_message()
    if "\n" in message:
        error.show()
    else:
        end = " See --help" if message.endswith("?") else "; see --help"
        name = error.ctx.command_path if error.ctx is not None else "slipstream"
        print(f"{name}: {message.rstrip('.')}{end}", file=sys.stderr)
    return int(error.exit_code)


@takes_access
def status(
    instance: StatusInstance = None,
    endpoint: Annotated[
        list[str] | None,
        typer.Option(help="host:port of a process (a router's admin port); repeatable."),
    ] = None,
    as_json: AsJson = False,
    *,
    access: OperatorAccess,
) -> None:
    """Show what the processes of a cluster, or those at --endpoint, run and hold."""
    from slipstream.cli.status import show_endpoints, show_fleet, show_process

    if instance is not None:
        check_one_process(endpoint)
        run_async(show_process(_named(access), instance, as_json=as_json))
    elif endpoint:
        check_endpoints(endpoint)
        run_async(show_endpoints(endpoint, as_json=as_json, dial=access.dial()))
    else:
        run_async(show_fleet(_named(access), as_json=as_json))


@takes_access
def drain(instance: Instance, timeout_s: DrainTimeoutS = DRAIN_S, *, access: OperatorAccess) -> None:
    """Let a process of a cluster take no new work. It runs on."""
    from slipstream.cli.fleet.drains import drain

    run_async(drain(_named(access), instance, timeout_s=timeout_s))


@takes_access
def undrain(instance: Instance, timeout_s: UndrainTimeoutS = UNDRAIN_S, *, access: OperatorAccess) -> None:
    """Let a drained process of a cluster take work again."""
    from slipstream.cli.fleet.drains import undrain

    run_async(undrain(_named(access), instance, timeout_s=timeout_s))


@takes_access
def restart(
    instance: Annotated[str | None, typer.Argument(help="Name of a process; or --rolling.")] = None,
    rolling: Rolling = False,
    timeout_s: RestartTimeoutS = 180.0,
    *,
    access: OperatorAccess,
) -> None:
    """Drain a process of a cluster, end it, and wait until its process manager has started it again."""
    from slipstream.cli.fleet.drains import restart

    check_which(instance, rolling=rolling)
    run_async(restart(_named(access), instance, timeout_s=timeout_s))


def _named(access: OperatorAccess) -> FleetClient:
    """The cluster of --router: the server package knows local clusters."""
    if not access.routers:
        raise InvalidArgument("--router", "is needed: host:port of a router's gRPC admin port")
    return access.fleet_client()


@takes_client
def chat(
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    tools: Annotated[Path | None, typer.Option(help="JSON file: a list of tools, OpenAI-shaped.")] = None,
    thinking: Annotated[bool, typer.Option(help="Let the model reason first.")] = False,
    temperature: Annotated[float | None, typer.Option(help="0 = always the likeliest token.")] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same answers.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 512,
    *,
    access: ClientAccess,
) -> None:
    """Talk to the model in the terminal.

    /help lists the commands. Ctrl-C ends an answer, Ctrl-D the conversation. You answer the model's tool
    calls. The exit code is 1 where the last turn failed.
    """
    from slipstream.cli.chat.session import ChatOptions, read_tools, run_chat
    from slipstream.requests import ChatArguments

    arguments: ChatArguments = {"max_tokens": max_tokens, "thinking": thinking}
    if temperature is not None:
        arguments["temperature"] = temperature
    if seed is not None:
        arguments["seed"] = seed
    declared = read_tools(tools) if tools is not None else []
    if not run_chat(ChatOptions(access, system, declared, arguments)):
        raise typer.Exit(1)


def _needs_server(name: str) -> Callable[[], None]:
    def explain() -> None:
        raise FailedPrecondition(
            f"`slipstream {name}` is a command of the server package: pip install slipstream-server"
        )

    return explain


def _version(wanted: bool) -> None:
    if wanted:
        print(f"slipstream {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Talk to a Slipstream cluster, and run a local one."""


def build_app() -> typer.Typer:
    """The command line of this installation: the SDK's commands and those of installed packages."""
    built = typer.Typer(
        name="slipstream",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    built.callback()(_root)
    own: dict[str, InstalledCommand] = {
        "autoscale": autoscale,
        "chat": chat,
        "drain": drain,
        "restart": restart,
        "status": status,
        "top": top,
        "undrain": undrain,
        "usage": usage,
    }
    groups = {"kv": kv_app, "keys": keys_app, "jobs": jobs_app}
    installed = find_commands(groups)
    for name, command in {**own, **installed, **groups}.items():
        add_command(built, name, command)
    for name in _SERVER_COMMANDS:
        if name not in installed:
            built.command(name, hidden=True, context_settings=ANY_ARGUMENTS)(_needs_server(name))
    name_sources(built)
    return built


app = build_app()
