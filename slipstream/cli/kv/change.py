"""`slipstream kv verify` and `drop`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import grpc

from slipstream.block_hashes import unpack_hashes
from slipstream.cli.chat.harmless_text import harmless_line
from slipstream.cli.kv.nodes import Nodes, ask_all
from slipstream.cli.tables import figures_table, print_table
from slipstream.errors import DataCorrupt
from slipstream.v1 import kvstore_pb2, kvstore_pb2_grpc

_VERIFY_S = 3600.0
_DROP_S = 60.0


async def verify_blocks(nodes: Nodes, hashes: bytes, *, as_json: bool) -> bool:
    """Verify the blocks (none named: all) of each node; whether any was corrupt or a node silent."""

    async def ask(channel: grpc.aio.Channel) -> dict[str, Any]:
        request = kvstore_pb2.VerifyBlocksRequest(block_hashes=hashes)
        corrupt: list[str] = []
        last = kvstore_pb2.VerifyBlocksResponse()
        async for last in kvstore_pb2_grpc.KvstoreServiceStub(channel).VerifyBlocks(
            request, timeout=_VERIFY_S
        ):
            corrupt += [block_hash.hex() for block_hash in _hashes(last.corrupt)]
            if not last.last:
                print(f"slipstream: {last.verified} of {last.copies} verified", file=sys.stderr)
        return {"verified": last.verified, "corrupt": corrupt, "unreadable": last.unreadable}

    answers = await ask_all(nodes, ask)
    rows = [{"node": a.node, **(a.said or {}), "error": a.trouble} for a in answers]
    _print(rows, ("verified", "corrupt", "unreadable"), as_json=as_json)
    if not as_json:
        for row in rows:
            for block_hash in row.get("corrupt", ()):
                print(f"{row['node']}: {block_hash} was corrupt and is dropped")
    return any(row["error"] or row["corrupt"] for row in rows)


def _hashes(packed: bytes) -> list[bytes]:
    """Raises DataCorrupt."""
    try:
        return unpack_hashes(packed)
    except ValueError as error:
        raise DataCorrupt(f"the node named blocks that cannot be read: {error}") from None


async def drop_blocks(nodes: Nodes, hashes: bytes, *, as_json: bool) -> None:
    """Drop the blocks (none named: all) of each node, and of several nodes twice. Until all have done so, one
    that has not may put a block into the pool, and one that has may load it from there."""

    async def ask(channel: grpc.aio.Channel) -> dict[str, Any]:
        request = kvstore_pb2.DropBlocksRequest(block_hashes=hashes, all=not hashes)
        answer = await kvstore_pb2_grpc.KvstoreServiceStub(channel).DropBlocks(request, timeout=_DROP_S)
        return {"blocks": answer.blocks, "copies": answer.dropped, "pool_kept": answer.pool_kept}

    answers = await ask_all(nodes, ask)
    rows = [{"node": a.node, **(a.said or {}), "error": a.trouble} for a in answers]
    if len(rows) > 1:
        for row, again in zip(rows, await ask_all(nodes, ask), strict=True):
            said = again.said or {}
            row.update({name: row.get(name, 0) + said[name] for name in ("blocks", "copies") if name in said})
            row.update(pool_kept=said.get("pool_kept", row.get("pool_kept", False)), error=again.trouble)
    if not as_json:
        for row in rows:
            if row.get("pool_kept"):
                row["error"] = "the pool did not answer: it has kept its copies"
    _print(rows, ("blocks", "copies"), as_json=as_json)


def _print(rows: Sequence[dict[str, Any]], columns: Sequence[str], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    table = figures_table(("node",), columns)
    for row in rows:
        values = (row.get(column, "-") for column in columns)
        table.add_row(
            row["node"], *(str(len(value) if isinstance(value, list) else value) for value in values)
        )
    print_table(table)
    for row in rows:
        if row["error"]:
            print(harmless_line(f"{row['node']}: {row['error']}"))
