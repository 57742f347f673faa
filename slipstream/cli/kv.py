"""`slipstream kv`: list, count, check and drop the blocks of the KV store nodes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from string import hexdigits
from typing import Annotated

import typer

from slipstream.cli.options import (
    AsJson,
    ClusterSecretFile,
    RunDir,
    TlsCa,
    TlsCertificate,
    TlsKey,
    tls_from,
)
from slipstream.errors import InvalidArgument

kv_app = typer.Typer(
    help="List, count, check and drop blocks of the KV store nodes.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
)

Nodes = Annotated[
    list[str] | None, typer.Option("--node", help="Only this node: its name or host:port; repeatable.")
]
Hashes = Annotated[list[str] | None, typer.Argument(help="Block hashes, 32 hex digits each.")]


@kv_app.command("ls")
def list_blocks(
    run_dir: RunDir = Path(".run"),
    node: Nodes = None,
    prefix: Annotated[str, typer.Option(help="Only hashes that begin with these hex digits.")] = "",
    limit: Annotated[int, typer.Option(min=0, help="Most blocks to list; 0 = all.")] = 50,
    as_json: AsJson = False,
    tls_ca: TlsCa = None,
    tls_certificate: TlsCertificate = None,
    tls_key: TlsKey = None,
    cluster_secret_file: ClusterSecretFile = None,
) -> None:
    """List the blocks held, with the tiers that hold them."""
    from slipstream.cli.kv_nodes import kv_nodes
    from slipstream.cli.kv_show import show_blocks
    from slipstream.operator_access import operator_dial

    if not set(prefix) <= set(hexdigits):
        raise InvalidArgument("--prefix", "must be hex digits")
    tls = tls_from(tls_ca, tls_certificate, tls_key)
    nodes = kv_nodes(run_dir, node or [], dial=operator_dial(run_dir, given=cluster_secret_file, tls=tls))
    asyncio.run(show_blocks(nodes, prefix=prefix.lower(), limit=limit, as_json=as_json))


@kv_app.command("stat")
def stat(
    run_dir: RunDir = Path(".run"),
    node: Nodes = None,
    as_json: AsJson = False,
    tls_ca: TlsCa = None,
    tls_certificate: TlsCertificate = None,
    tls_key: TlsKey = None,
    cluster_secret_file: ClusterSecretFile = None,
) -> None:
    """Show what each tier of each node holds and has served."""
    from slipstream.cli.kv_nodes import kv_nodes
    from slipstream.cli.kv_show import show_tiers
    from slipstream.operator_access import operator_dial

    tls = tls_from(tls_ca, tls_certificate, tls_key)
    nodes = kv_nodes(run_dir, node or [], dial=operator_dial(run_dir, given=cluster_secret_file, tls=tls))
    asyncio.run(show_tiers(nodes, as_json=as_json))


@kv_app.command("verify")
def verify(
    hashes: Hashes = None,
    run_dir: RunDir = Path(".run"),
    node: Nodes = None,
    as_json: AsJson = False,
    tls_ca: TlsCa = None,
    tls_certificate: TlsCertificate = None,
    tls_key: TlsKey = None,
    cluster_secret_file: ClusterSecretFile = None,
) -> None:
    """Compare blocks with their checksums; drop the corrupt ones.

    All blocks, unless some are named. Exit code 1 when any was corrupt.
    """
    from slipstream.cli.kv_change import verify_blocks
    from slipstream.cli.kv_nodes import kv_nodes
    from slipstream.operator_access import operator_dial

    tls = tls_from(tls_ca, tls_certificate, tls_key)
    nodes = kv_nodes(run_dir, node or [], dial=operator_dial(run_dir, given=cluster_secret_file, tls=tls))
    if asyncio.run(verify_blocks(nodes, _packed(hashes), as_json=as_json)):
        raise SystemExit(1)


@kv_app.command("drop")
def drop(
    hashes: Hashes = None,
    every: Annotated[bool, typer.Option("--all", help="Drop everything that the nodes hold.")] = False,
    run_dir: RunDir = Path(".run"),
    node: Nodes = None,
    as_json: AsJson = False,
    tls_ca: TlsCa = None,
    tls_certificate: TlsCertificate = None,
    tls_key: TlsKey = None,
    cluster_secret_file: ClusterSecretFile = None,
) -> None:
    """Drop blocks from every tier.

    A later request computes a dropped block again.
    """
    from slipstream.cli.kv_change import drop_blocks
    from slipstream.cli.kv_nodes import kv_nodes
    from slipstream.operator_access import operator_dial

    if every == bool(hashes):
        raise InvalidArgument("drop", "name block hashes, or say --all")
    tls = tls_from(tls_ca, tls_certificate, tls_key)
    nodes = kv_nodes(run_dir, node or [], dial=operator_dial(run_dir, given=cluster_secret_file, tls=tls))
    asyncio.run(drop_blocks(nodes, _packed(hashes), as_json=as_json))


def _packed(hashes: list[str] | None) -> bytes:
    """Hashes as they travel. Raises InvalidArgument."""
    packed = b""
    for text in hashes or []:
        try:
            block_hash = bytes.fromhex(text)
        except ValueError:
            block_hash = b""
        if len(block_hash) != 16:
            raise InvalidArgument(text, "is not the hash of a block: 32 hex digits")
        packed += block_hash
    return packed
