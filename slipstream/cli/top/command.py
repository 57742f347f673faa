"""`slipstream top`: the command and its flags."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.cli.access import OperatorAccess, takes_access
from slipstream.cli.options import seconds_option
from slipstream.cli.run_async import run_async
from slipstream.errors import InvalidArgument

if TYPE_CHECKING:
    from rich.console import Console

    from slipstream.cli.fleet.fleet_client import FleetClient

_MIN_INTERVAL_S, _MAX_INTERVAL_S = 0.2, 3600.0


@takes_access
def top(
    once: Annotated[bool, typer.Option("--once", help="Print the view once, as without a terminal.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print it once as JSON.")] = False,
    sort: Annotated[
        str, typer.Option(help="tier, or the largest load, kv, tokens, step or busy first.")
    ] = "tier",
    interval_s: Annotated[
        float, seconds_option("Seconds between two looks.", least_s=_MIN_INTERVAL_S, most_s=_MAX_INTERVAL_S)
    ] = 1.0,
    *,
    access: OperatorAccess,
) -> None:
    """Show tiers, processes and their load live, as a router sees them.

    Keys: q ends, p pauses, s sorts by the next column. The arrows, PgUp, PgDn, Home and End choose a process:
    d drains it and u lets it take work again, after a question.
    """
    from rich.console import Console

    from slipstream.cli.top.rows import SORTS

    if sort not in SORTS:
        raise InvalidArgument("--sort", f"must be one of {', '.join(SORTS)}, not {sort!r}")
    console, client = Console(highlight=False), access.fleet_client()
    if once or as_json or not console.is_terminal:
        run_async(_once(client, console, sort=sort, as_json=as_json))
    else:
        run_async(_live(client, console, sort=sort, interval_s=interval_s))


async def _once(client: FleetClient, console: Console, *, sort: str, as_json: bool) -> None:
    from slipstream.cli.top.live import print_once
    from slipstream.cli.top.rows import view_dict, view_of
    from slipstream.cli.top.screen import ScreenState

    view = view_of(await client.get())
    if as_json:
        print(json.dumps(view_dict(view, sort), indent=2))
    else:
        print_once(view, ScreenState(client.router, _time_text(), sort), console=console)


async def _live(client: FleetClient, console: Console, *, sort: str, interval_s: float) -> None:
    from slipstream.cli.top.live import LiveFleet

    live = LiveFleet(client, console=console, interval_s=interval_s, sort=sort, clock_text=_time_text)
    await live.run()


def _time_text() -> str:
    import time

    return time.strftime("%H:%M:%S")
