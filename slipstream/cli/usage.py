"""`slipstream usage`: what tenants have used, and what it costs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.cli.client_access import ClientAccess, takes_client
from slipstream.cli.options import AsJson

if TYPE_CHECKING:
    from slipstream.metering.usage import UsageRecord

_FIGURES = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")


@takes_client
def usage(
    from_day: Annotated[str, typer.Option("--from", help="First day, as 2027-01-31; default: 30 days.")] = "",
    to_day: Annotated[str, typer.Option("--to", help="Last day; default: today (UTC).")] = "",
    by: Annotated[
        str, typer.Option(help="What has a separate row: day,tenant,key,model,endpoint.")
    ] = "model",
    tenant: Annotated[str, typer.Option(help="This tenant alone, for operators.")] = "",
    as_json: AsJson = False,
    *,
    access: ClientAccess,
) -> None:
    """Show what a tenant has used, and what it costs. Operators see all tenants."""
    groups = [name for name in by.split(",") if name]
    with access.open() as client:
        rows = client.usage(from_day=from_day, to_day=to_day, group_by=groups, tenant=tenant)
    if as_json:
        print(json.dumps([dataclasses.asdict(row) for row in rows], indent=2, default=str))
    else:
        _show(rows, groups)


def _show(rows: Sequence[UsageRecord], groups: Sequence[str]) -> None:
    from slipstream.cli.tables import cell, figures_table, print_table

    if not rows:
        print("no usage")
        return
    headings = (name.replace("_", " ") for name in _FIGURES)
    table = figures_table(groups, (*headings, "cost", "currency"))
    for row in rows:
        names = (cell(getattr(row, name)) or "-" for name in groups)
        figures = (f"{getattr(row, name):,}" for name in _FIGURES)
        table.add_row(*names, *figures, f"{row.cost:,f}", row.currency or "-")
    print_table(table)
