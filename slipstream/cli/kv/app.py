"""`slipstream kv`: list, count, check and drop the blocks of the KV store nodes."""

from __future__ import annotations

from string import hexdigits
from typing import Annotated

import typer

from slipstream.cli.access import OperatorAccess, takes_access
from slipstream.cli.options import AsJson
from slipstream.cli.run_async import run_async
from slipstream.errors import InvalidArgument

kv_app = typer.Typer(
    help="List, count, check and drop blocks of the KV store nodes.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
)

Nodes = Annotated[
    list[str] | None,
    typer.Option("--node", help="Only this node: its name, kvstore/name or host:port; repeatable."),
]
Hashes = Annotated[list[str] | None, typer.Argument(help="Block hashes, 32 hex digits each.")]


@kv_app.command("ls")
@takes_access
def list_blocks(
    node: Nodes = None,
    prefix: Annotated[str, typer.Option(help="Only hashes that begin with these hex digits.")] = "",
    limit: Annotated[int, typer.Option(min=0, help="Most blocks to list; 0 = all.")] = 50,
    as_json: AsJson = False,
    *,
    access: OperatorAccess,
) -> None:
    """List the blocks held, with the tiers that hold them."""
    from slipstream.cli.kv.nodes import kv_nodes
    from slipstream.cli.kv.show import show_blocks

    if not set(prefix) <= set(hexdigits):
        raise InvalidArgument("--prefix", "must be hex digits")
    nodes = kv_nodes(access, node or [])
    run_async(show_blocks(nodes, prefix=prefix.lower(), limit=limit, as_json=as_json))


@kv_app.command("stat")
@takes_access
def stat(
    node: Nodes = None,
    as_json: AsJson = False,
    *,
    access: OperatorAccess,
) -> None:
    """Show what each tier of each node holds and has served."""
    from slipstream.cli.kv.nodes import kv_nodes
    from slipstream.cli.kv.show import show_tiers

    nodes = kv_nodes(access, node or [])
    run_async(show_tiers(nodes, as_json=as_json))


@kv_app.command("verify")
@takes_access
def verify(
    hashes: Hashes = None,
    node: Nodes = None,
    as_json: AsJson = False,
    *,
    access: OperatorAccess,
) -> None:
    """Compare blocks with their checksums; drop the corrupt ones.

    All blocks, unless some are named. Exit code 1 when any was corrupt.
    """
    from slipstream.cli.kv.change import verify_blocks
    from slipstream.cli.kv.nodes import kv_nodes

    nodes = kv_nodes(access, node or [])
    if run_async(verify_blocks(nodes, _packed(hashes), as_json=as_json)):
        raise SystemExit(1)


@kv_app.command("drop")
@takes_access
def drop(
    hashes: Hashes = None,
    every: Annotated[bool, typer.Option("--all", help="Drop everything that the nodes hold.")] = False,
    node: Nodes = None,
    as_json: AsJson = False,
    *,
    access: OperatorAccess,
) -> None:
    """Drop blocks from every tier.

    A later request computes a dropped block again.
    """
    from slipstream.cli.kv.change import drop_blocks
    from slipstream.cli.kv.nodes import kv_nodes

    if every == bool(hashes):
        raise InvalidArgument("drop", "name block hashes, or say --all")
    nodes = kv_nodes(access, node or [])
    run_async(drop_blocks(nodes, _packed(hashes), as_json=as_json))


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
