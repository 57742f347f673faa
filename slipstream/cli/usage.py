"""`slipstream usage`: what tenants have used, and what it costs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.cli.options import (
    AsJson,
    RunDir,
    TlsCa,
    TlsCertificate,
    TlsKey,
    TlsServerName,
    check_endpoints,
    read_api_key,
    tls_from,
)

if TYPE_CHECKING:
    from slipstream.metering.usage import UsageRecord

_FIGURES = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")


def usage(
    run_dir: RunDir = Path(".run"),
    endpoint: Annotated[
        str | None, typer.Option(help="host:port of a router; default: that of the cluster in --run-dir.")
    ] = None,
    from_day: Annotated[str, typer.Option("--from", help="First day, as 2027-01-31; default: 30 days.")] = "",
    to_day: Annotated[str, typer.Option("--to", help="Last day; default: today (UTC).")] = "",
    by: Annotated[
        str, typer.Option(help="What has a row of its own: day,tenant,key,model,endpoint.")
    ] = "model",
    tenant: Annotated[str, typer.Option(help="This tenant alone, for operators.")] = "",
    api_key: Annotated[
        str | None, typer.Option(envvar="SLIPSTREAM_API_KEY", help="Key of a tenant or an operator.")
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(envvar="SLIPSTREAM_API_KEY_FILE", help="File with that key.")
    ] = None,
    tls_ca: TlsCa = None,
    tls_certificate: TlsCertificate = None,
    tls_key: TlsKey = None,
    tls_server_name: TlsServerName = "",
    as_json: AsJson = False,
) -> None:
    """Show what a tenant has used, and what it costs. Operators see all tenants."""
    from slipstream.client import Client
    from slipstream.cluster_record import read_record

    check_endpoints(endpoint.split(",") if endpoint else ())
    tls = tls_from(tls_ca, tls_certificate, tls_key, tls_server_name)
    if endpoint is None:
        record = read_record(run_dir, instead="--endpoint HOST:PORT")
        endpoint, tls = record.router_grpc, tls or record.tls_files()
    groups = [name for name in by.split(",") if name]
    with Client(endpoint, api_key=read_api_key(api_key, api_key_file), tls=tls) as client:
        rows = client.usage(from_day=from_day, to_day=to_day, group_by=groups, tenant=tenant)
    if as_json:
        print(json.dumps([dataclasses.asdict(row) for row in rows], indent=2, default=str))
    else:
        _show(rows, groups)


def _show(rows: Sequence[UsageRecord], groups: Sequence[str]) -> None:
    from rich.markup import escape

    from slipstream.cli.tables import figures_table, print_table

    if not rows:
        print("no usage")
        return
    headings = (name.replace("_", " ") for name in _FIGURES)
    table = figures_table(groups, (*headings, "cost", "currency"))
    for row in rows:
        names = (escape(getattr(row, name)) or "-" for name in groups)
        figures = (f"{getattr(row, name):,}" for name in _FIGURES)
        table.add_row(*names, *figures, f"{row.cost:,f}", row.currency or "-")
    print_table(table)
