"""`slipstream autoscale`: the command and its flags. What it does is in recommendations.py."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli.options import (
    AsJson,
    ClusterSecretFile,
    RunDir,
    TlsCa,
    TlsCertificate,
    TlsKey,
    check_endpoints,
    tls_from,
)
from slipstream.errors import InvalidArgument

_TIERS = ("router", "prefill", "decode", "kvstore", "drafter")


def autoscale(
    run_dir: RunDir = Path(".run"),
    endpoint: Annotated[
        str | None, typer.Option(help="host:port of a router's admin port; default: of --run-dir.")
    ] = None,
    explain: Annotated[bool, typer.Option(help="Show the signal that decides each tier, and why.")] = False,
    drain_one: Annotated[
        str | None,
        typer.Option(metavar="TIER", help="Drain the worker of this tier whose loss costs least."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Drain it without asking.")] = False,
    as_json: AsJson = False,
    tls_ca: TlsCa = None,
    tls_certificate: TlsCertificate = None,
    tls_key: TlsKey = None,
    cluster_secret_file: ClusterSecretFile = None,
) -> None:
    """Show how many processes of each tier the present load wants."""
    from slipstream.cli.recommendations import admin_port, drain_least, show_recommendations
    from slipstream.operator_access import operator_dial

    if drain_one is not None and drain_one not in _TIERS:
        raise InvalidArgument("--drain-one", f"must be one of {', '.join(_TIERS)}")
    check_endpoints([endpoint] if endpoint else ())
    tls = tls_from(tls_ca, tls_certificate, tls_key)
    dial = operator_dial(run_dir, given=cluster_secret_file, tls=tls)
    admin = endpoint or admin_port(run_dir)
    if drain_one is not None:
        drain_least(admin, drain_one, dial=dial, confirmed=yes)
    else:
        show_recommendations(admin, dial=dial, explain=explain, as_json=as_json)
