"""`slipstream status`: what every process says about itself, and the placements in etcd."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict
from msgspec import structs
from rich.markup import escape
from rich.table import Table

from libs.common.cluster.placement_record import SESSIONS_PREFIX, SessionId, decode_placement
from libs.common.cluster.worker_record import Role
from libs.common.etcd.client import EtcdClient
from libs.common.rpc.dial import dial
from libs.common.rpc.tls import TlsFiles
from slipstream.cli.tables import figures_table, print_table
from slipstream.errors import SlipstreamError
from slipstream.supervisor.state import (
    OWN_ROLES,
    ClusterRecord,
    ProcessRecord,
    children,
    read_record,
    resident_bytes,
)
from slipstream.v1 import worker_pb2, worker_pb2_grpc

_ASK_S = 2.0
# One of two processes is missed by so many connections once in a million times.
_CONNECTIONS_A_PROCESS = 10
_SESSION_ROWS = 20
_POOL_AWAY = "slipstream_kvstore_pool_away"
# Columns of the worker table: heading and field of a LoadReport.
_LOAD_FIELDS = {
    "runs": "requests_running",
    "waits": "requests_waiting",
    "prefill tokens": "prefill_tokens_in_flight",
    "decode tokens": "decode_tokens_in_flight",
    "blocks held": "blocks_held",
    "cached": "blocks_cached",
    "free": "blocks_free",
}


async def show_status(run_dir: Path, *, as_json: bool, tls: TlsFiles | None = None) -> None:
    """Print the status of the cluster in `run_dir`. `NotFound` if none runs there."""
    record = read_record(run_dir)
    answers, (sessions, trouble) = await asyncio.gather(
        asyncio.gather(*(_ask(process, tls) for process in record.processes)), _placements(record.etcd)
    )
    workers = [row for told in zip(record.processes, answers, strict=True) for row in _rows(*told)]
    if as_json:
        cluster = {key: value for key, value in asdict(record).items() if key != "processes"}
        document = {"cluster": cluster, "workers": workers, "sessions": sessions, "etcd_error": trouble}
        print(json.dumps(document, indent=2))
        return
    print(_heading(record, workers))
    print_table(_worker_table(workers))
    if trouble:
        print(f"placements are not known: {trouble}")
    else:
        _print_sessions(sessions)


async def _ask(process: ProcessRecord, tls: TlsFiles | None) -> list[worker_pb2.GetStatusResponse]:
    """What the process says about itself; of a router that runs as several on one port, what each says.

    The kernel chooses which of them a connection reaches: new ones are made until all have answered.
    """
    if process.pid is None or process.role not in OWN_ROLES:
        return []
    n_processes = max(len(children(process.pid)), 1) if process.role == Role.ROUTER else 1
    answers: dict[str, worker_pb2.GetStatusResponse] = {}
    for _ in range(1 if n_processes == 1 else _CONNECTIONS_A_PROCESS * n_processes):
        answer = await _ask_one(process.endpoint, tls)
        if answer is not None:
            answers[answer.instance] = answer
        if len(answers) == n_processes:
            break
    return [answers[instance] for instance in sorted(answers)]


async def _ask_one(endpoint: str, tls: TlsFiles | None) -> worker_pb2.GetStatusResponse | None:
    """None if it does not answer."""
    async with dial(endpoint, tls=tls) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        try:
            return await stub.GetStatus(worker_pb2.GetStatusRequest(), timeout=_ASK_S)
        except grpc.aio.AioRpcError:
            return None


async def _placements(etcd: str) -> tuple[list[dict[str, Any]], str | None]:
    """All recorded placements, newest first; or why they are not known."""
    client = EtcdClient(etcd.split(","), timeout_s=_ASK_S)
    try:
        entries = (await client.get_prefix(SESSIONS_PREFIX)).entries.values()
    except SlipstreamError as error:
        return [], error.message
    finally:
        await client.close()
    sessions = []
    for entry in sorted(entries, key=lambda entry: -entry.mod_revision):
        try:
            session = SessionId.from_key(entry.key)
            placement = decode_placement(entry.value, epoch=entry.mod_revision)
        except ValueError:
            continue
        row = {**structs.asdict(session), **structs.asdict(placement), "tail_hash": placement.tail_hash.hex()}
        sessions.append(row)
    return sessions, None


def _rows(process: ProcessRecord, answers: Sequence[worker_pb2.GetStatusResponse]) -> list[dict[str, Any]]:
    """One for each that answered, at least one; the memory of all is in the first."""
    rss = 0
    if process.pid is not None:
        rss = resident_bytes(process.pid) + sum(map(resident_bytes, children(process.pid)))
    first = {**asdict(process), "rss_bytes": rss, "status": _said(answers[0]) if answers else None}
    others = [
        {**asdict(process), "instance": answer.instance, "rss_bytes": 0, "status": _said(answer)}
        for answer in answers[1:]
    ]
    return [first, *others]


def _said(answer: worker_pb2.GetStatusResponse) -> dict[str, Any]:
    return MessageToDict(answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


def _heading(record: ClusterRecord, workers: Sequence[Mapping[str, Any]]) -> str:
    total_mb = (sum(worker["rss_bytes"] for worker in workers) + resident_bytes(record.supervisor_pid)) / 1e6
    ready = f"ready after {record.ready_s:.1f} s" if record.ready_s is not None else "starting"
    return (
        f"since {record.started_at}, {ready}, {total_mb:.0f} MB in all\n"
        f"gRPC {record.router_grpc}   HTTP http://{record.router_http}/v1   etcd {record.etcd}"
    )


def _worker_table(workers: Sequence[Mapping[str, Any]]) -> Table:
    table = figures_table(("worker", "state"), ("pid", "restarts", "RSS MB", *_LOAD_FIELDS))
    for worker in workers:
        cells = [
            worker["instance"],
            _state(worker),
            str(worker["pid"] or "-"),
            str(worker["restarts"]),
            f"{worker['rss_bytes'] / 1e6:.0f}",
        ]
        load = (worker["status"] or {}).get("load") or {}
        table.add_row(*cells, *(str(load.get(field, "-")) for field in _LOAD_FIELDS.values()))
    return table


def _state(worker: Mapping[str, Any]) -> str:
    if worker["role"] not in OWN_ROLES:
        return str(worker["state"])
    if worker["status"] is None and worker["state"] == "ready":
        return "no answer"
    if worker["status"] is not None and worker["status"]["draining"]:
        return "draining"
    if worker["status"] is not None and worker["status"]["counters"].get(_POOL_AWAY):
        return f"{worker['state']}, pool away"
    return str(worker["state"])


def _print_sessions(sessions: Sequence[Mapping[str, Any]]) -> None:
    if not sessions:
        print("no sessions")
        return
    table = figures_table(("session", "tenant", "prefill", "decode", "kvstore"), ("blocks", "epoch"))
    for row in sessions[:_SESSION_ROWS]:
        fields = ("session", "tenant", "prefill", "decode", "kvstore", "block_count", "epoch")
        table.add_row(*(escape(str(row[field])) for field in fields))
    print_table(table)
    if len(sessions) > _SESSION_ROWS:
        print(f"and {len(sessions) - _SESSION_ROWS} more")
