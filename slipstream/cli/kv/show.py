"""`slipstream kv ls` and `stat`, which only read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import grpc

from slipstream.block_view import BlockView, EventMissed
from slipstream.cli.chat.harmless_text import harmless_line
from slipstream.cli.kv.nodes import NodeReply, Nodes, ask_all
from slipstream.cli.status import check_all_answered
from slipstream.cli.tables import figures_table, print_table
from slipstream.enum_names import KVSTORE_TIERS
from slipstream.errors import DataCorrupt
from slipstream.v1 import kv_events_pb2_grpc, worker_pb2, worker_pb2_grpc

_ASK_S = 5.0
_LIST_S = 60.0
# What is not called alike in all tiers.
_REWANTED = {
    "dram": "evicted_rerequested",
    "nvme": "evicted_rerequested_nvme",
    "pool": "evicted_rerequested_pool",
}
_CORRUPT = {"dram": "corrupt_blocks_dram", "nvme": "corrupt_blocks", "pool": "pool_corrupt_blocks"}
_WRONG = ("corrupt_blocks", "quarantined_bytes", "unreachable_blocks", "unreachable_dropped")
_TOTALS = {
    "misses": "misses_total",
    "evictions": "evictions_total",
    "disk errors": "disk_errors_total",
    "read-only disks": "disk_read_only",
    "not written": "writes_dropped_total",
    "pool unavailable": "pool_unavailable",
    "not pooled": "pool_puts_dropped_total",
}


async def show_blocks(nodes: Nodes, *, prefix: str, limit: int, as_json: bool) -> None:
    """Print the held blocks of each node in the order of their hashes. Raises Unavailable."""
    answers = await ask_all(nodes, _held)
    listed = [
        {"node": answer.node, **_blocks(answer.said or {}, prefix, limit), "error": answer.trouble}
        for answer in answers
    ]
    if as_json:
        print(json.dumps(listed, indent=2))
    else:
        _print_blocks(listed)
    check_all_answered([answer.node for answer in answers if answer.said is None])


def _print_blocks(listed: Sequence[Mapping[str, Any]]) -> None:
    table = figures_table(("node", "block", "tiers"), ())
    for node in listed:
        for block in node["blocks"]:
            table.add_row(node["node"], block["hash"], ", ".join(block["tiers"]))
    if table.row_count:
        print_table(table)
    for node in listed:
        shown = f"{len(node['blocks'])} of {node['held']} blocks"
        print(harmless_line(f"{node['node']}: {node['error'] or shown}"))


async def show_tiers(nodes: Nodes, *, as_json: bool) -> None:
    """Print what each tier holds and has served, and what went wrong. Raises Unavailable."""
    answers = await ask_all(nodes, _status)
    shown = [_node(answer) for answer in answers]
    if as_json:
        print(json.dumps(shown, indent=2))
    else:
        _print_tiers(shown)
    check_all_answered([answer.node for answer in answers if answer.said is None])


def _print_tiers(shown: Sequence[Mapping[str, Any]]) -> None:
    tiers = figures_table(("node", "tier"), ("blocks", "MB", "hits", "hit MB", "pins", "pin ms"))
    wrong = figures_table(
        ("node", "tier"), ("rewanted", "gap s", "corrupt", "quarantined bytes", "unreachable", "dropped")
    )
    totals = figures_table(("node",), (*_TOTALS, "pins", "reserved", "quarantined bytes", "leaked"))
    for node in shown:
        if node["error"]:
            continue
        for name, tier in node["tiers"].items():
            cells = (
                f"{tier['blocks']:.0f}",
                f"{tier['bytes'] / 1e6:.1f}",
                f"{tier['hits']:.0f}",
                f"{tier['hit_bytes'] / 1e6:.1f}",
                f"{tier['pins']:.0f}",
                f"{tier['mean_pin_ms']:.2f}",
            )
            tiers.add_row(node["node"], name, *cells)
            wrong.add_row(
                node["node"],
                name,
                f"{tier['rewanted_blocks']:.0f}",
                f"{tier['mean_rewanted_gap_ms'] / 1e3:.1f}",
                *(f"{tier[what]:.0f}" for what in _WRONG),
            )
        values = [*node["totals"].values(), *node["held"].values()]
        totals.add_row(node["node"], *(f"{value:.0f}" for value in values))
    if totals.row_count:
        for table in (tiers, wrong):
            print_table(table)
            print()
        print_table(totals)
    for node in shown:
        if node["error"]:
            print(harmless_line(f"{node['node']}: {node['error']}"))


async def _held(channel: grpc.aio.Channel) -> dict[int, set[bytes]]:
    """The blocks of a node by tier, from the snapshot that a new watcher gets."""
    view = BlockView()
    call = kv_events_pb2_grpc.KvEventServiceStub(channel).WatchBlocks(view.resume(), timeout=_LIST_S)
    try:
        async for response in call:
            view.apply(response)
            if view.incarnation:
                break
    except (EventMissed, ValueError) as error:
        raise DataCorrupt(f"the node listed blocks that cannot be read: {error}") from None
    finally:
        call.cancel()
    return view.held


async def _status(channel: grpc.aio.Channel) -> worker_pb2.GetStatusResponse:
    stub = worker_pb2_grpc.WorkerServiceStub(channel)
    return await stub.GetStatus(worker_pb2.GetStatusRequest(), timeout=_ASK_S)


def _blocks(held: Mapping[int, set[bytes]], prefix: str, limit: int) -> dict[str, Any]:
    tiers: dict[bytes, list[str]] = {}
    for name, tier in KVSTORE_TIERS.values.items():
        for block_hash in held.get(tier, ()):
            tiers.setdefault(block_hash, []).append(name)
    chosen = sorted(block_hash for block_hash in tiers if block_hash.hex().startswith(prefix))
    shown = chosen[:limit] if limit else chosen
    return {"held": len(tiers), "blocks": [{"hash": h.hex(), "tiers": tiers[h]} for h in shown]}


def _node(answer: NodeReply[worker_pb2.GetStatusResponse]) -> dict[str, Any]:
    if answer.said is None:
        return {"node": answer.node, "error": answer.trouble}
    counters, ledger = answer.said.counters, answer.said.ledger

    def figure(name: str) -> float:
        return float(counters.get(f"slipstream_kvstore_{name}", 0.0))

    def tier(name: str) -> dict[str, float]:
        pins = figure(f'pin_seconds_count{{tier="{name}"}}')
        pins_s = figure(f'pin_seconds_sum{{tier="{name}"}}')
        rewanted = figure(f"{_REWANTED[name]}_total")
        gaps_s = figure(f"{_REWANTED[name]}_gap_seconds_total")
        quarantined = _quarantined(counters) if name == "dram" else figure(f"quarantined_bytes_{name}")
        return {
            "blocks": figure(f"blocks_{name}"),
            "bytes": figure(f"bytes_{name}"),
            "hits": figure(f"hits_{name}_total"),
            "hit_bytes": figure(f"hit_bytes_{name}_total"),
            "pins": pins,
            "mean_pin_ms": pins_s * 1e3 / pins if pins else 0.0,
            "rewanted_blocks": rewanted,
            "mean_rewanted_gap_ms": gaps_s * 1e3 / rewanted if rewanted else 0.0,
            "corrupt_blocks": figure(f"{_CORRUPT[name]}_total"),
            "quarantined_bytes": quarantined,
            "unreachable_blocks": figure(f"unreachable_blocks_{name}"),
            "unreachable_dropped": figure(f"unreachable_dropped_{name}_total"),
        }

    return {
        "node": answer.node,
        "error": "",
        "tiers": {name: tier(name) for name in KVSTORE_TIERS.values},
        "totals": {heading: figure(name) for heading, name in _TOTALS.items()},
        "held": {
            "pins": ledger.pins,
            "reservations": ledger.reservations,
            "quarantined_bytes": _quarantined(counters),
            "leaked_blocks": ledger.blocks_leaked,
        },
    }


def _quarantined(counters: Mapping[str, float]) -> float:
    """What the transport that writes to the memory tier has quarantined."""
    return float(counters.get("slipstream_kv_quarantined_bytes", 0.0))
