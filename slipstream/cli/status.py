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
from rich.console import Console
from rich.table import Table

from libs.common.dial import dial
from libs.common.errors import SlipstreamError
from libs.common.etcd.client import EtcdClient
from libs.common.placement_record import SESSIONS_PREFIX, SessionId, decode_placement
from libs.common.tls import TlsFiles
from slipstream.supervisor.state import ClusterRecord, ProcessRecord, read_record, resident_bytes
from slipstream.v1 import worker_pb2, worker_pb2_grpc

_ASK_S = 2.0
_SESSION_ROWS = 20
# Processes of others: they have no WorkerService.
_FOREIGN_ROLES = ("etcd", "pool-master")
# Columns of the worker table, under its last seven headings.
_LOAD_FIELDS = (
    "requests_running",
    "requests_waiting",
    "prefill_tokens_in_flight",
    "decode_tokens_in_flight",
    "blocks_held",
    "blocks_cached",
    "blocks_free",
)


async def show_status(run_dir: Path, *, as_json: bool, tls: TlsFiles | None = None) -> None:
    """Print the status of the cluster in `run_dir`. `NotFound` if none runs there."""
    record = read_record(run_dir)
    answers, (sessions, trouble) = await asyncio.gather(
        asyncio.gather(*(_ask(process, tls) for process in record.processes)), _placements(record.etcd)
    )
    workers = [_worker(process, answer) for process, answer in zip(record.processes, answers, strict=True)]
    if as_json:
        cluster = {key: value for key, value in asdict(record).items() if key != "processes"}
        document = {"cluster": cluster, "workers": workers, "sessions": sessions, "etcd_error": trouble}
        print(json.dumps(document, indent=2))
        return
    console = Console()
    console.print(_heading(record, workers))
    console.print(_worker_table(workers))
    if trouble:
        console.print(f"placements are not known: {trouble}", markup=False)
    else:
        console.print(_session_table(sessions))


async def _ask(process: ProcessRecord, tls: TlsFiles | None) -> worker_pb2.GetStatusResponse | None:
    """What the process says about itself; None if it does not answer."""
    if process.pid is None or process.role in _FOREIGN_ROLES:
        return None
    async with dial(process.endpoint, tls=tls) as channel:
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
        row = {**asdict(session), **asdict(placement), "tail_hash": placement.tail_hash.hex()}
        sessions.append(row)
    return sessions, None


def _worker(process: ProcessRecord, answer: worker_pb2.GetStatusResponse | None) -> dict[str, Any]:
    rss = resident_bytes(process.pid) if process.pid is not None else 0
    said = (
        MessageToDict(answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
        if answer is not None
        else None
    )
    return {**asdict(process), "rss_bytes": rss, "status": said}


def _heading(record: ClusterRecord, workers: Sequence[Mapping[str, Any]]) -> str:
    total_mb = (sum(worker["rss_bytes"] for worker in workers) + resident_bytes(record.supervisor_pid)) / 1e6
    ready = f"ready after {record.ready_s:.1f} s" if record.ready_s is not None else "starting"
    return (
        f"since {record.started_at}, {ready}, {total_mb:.0f} MB in all\n"
        f"gRPC {record.router_grpc}   HTTP http://{record.router_http}/v1   etcd {record.etcd}"
    )


def _worker_table(workers: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("worker")
    table.add_column("state")
    for heading in ("pid", "restarts", "RSS MB", "running", "waiting", "prefill tokens", "decode tokens"):
        table.add_column(heading, justify="right")
    for heading in ("blocks held", "cached", "free"):
        table.add_column(heading, justify="right")
    for worker in workers:
        cells = [
            worker["instance"],
            _state(worker),
            str(worker["pid"] or "-"),
            str(worker["restarts"]),
            f"{worker['rss_bytes'] / 1e6:.0f}",
        ]
        load = (worker["status"] or {}).get("load") or {}
        table.add_row(*cells, *(str(load.get(field, "-")) for field in _LOAD_FIELDS))
    return table


def _state(worker: Mapping[str, Any]) -> str:
    if worker["role"] in _FOREIGN_ROLES:
        return str(worker["state"])
    if worker["status"] is None and worker["state"] == "ready":
        return "no answer"
    if worker["status"] is not None and worker["status"]["draining"]:
        return "draining"
    return str(worker["state"])


def _session_table(sessions: Sequence[Mapping[str, Any]]) -> Table | str:
    if not sessions:
        return "no sessions"
    table = Table(box=None, pad_edge=False)
    for heading in ("session", "tenant", "prefill", "decode", "kvstore"):
        table.add_column(heading)
    table.add_column("blocks", justify="right")
    table.add_column("epoch", justify="right")
    for row in sessions[:_SESSION_ROWS]:
        fields = ("session", "tenant", "prefill", "decode", "kvstore", "block_count", "epoch")
        table.add_row(*(str(row[field]) for field in fields))
    if len(sessions) > _SESSION_ROWS:
        table.caption = f"and {len(sessions) - _SESSION_ROWS} more"
    return table
