"""`slipstream status`: what every process says about itself, and the placements in etcd."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from msgspec import structs
from rich.table import Table

from libs.common.cluster.kvstore_room import kvstore_rooms
from libs.common.cluster.placement_record import SESSIONS_PREFIX, SessionId, decode_placement
from libs.common.cluster.worker_record import WORKERS_PREFIX, Role, Worker, decode_worker
from libs.common.etcd.access import EtcdAccess
from libs.common.etcd.channel import EtcdTls
from libs.common.etcd.messages import KeyValue
from slipstream.cli.access import OperatorAccess
from slipstream.cli.chat.harmless_text import harmless_line
from slipstream.cli.status import (
    ASK_TIMEOUT_S,
    LOAD_COLUMNS,
    add_room,
    answer_fields,
    answer_state,
    ask_status,
    check_all_answered,
    load_cells,
    print_answer,
    print_troubles,
    show_process,
)
from slipstream.cli.tables import cell, figures_table, print_table
from slipstream.cluster_record import ClusterRecord, ProcessRecord, read_record
from slipstream.errors import FailedPrecondition, NotFound, SlipstreamError, Unavailable
from slipstream.rpc.dial import Dial
from slipstream.v1 import worker_pb2
from supervisor.drain_marks import drained_by
from supervisor.process_state import ProcessState, how_ended
from supervisor.process_stats import children, resident_bytes

# One of two processes is missed by so many connections once in a million times.
_CONNECTIONS_A_PROCESS = 10
_SESSION_ROWS = 20
_SILENT = "no answer"


async def show_status(run_dir: Path, *, as_json: bool, dial: Dial) -> None:
    """Print the status of the cluster in `run_dir`.

    Raises NotFound if none runs there, Unavailable if a ready process did not answer.
    """
    record = read_record(run_dir, instead="--endpoint HOST:PORT")
    answers, (sessions, rooms, trouble) = await asyncio.gather(
        asyncio.gather(*(_ask(process, dial) for process in record.processes)), _recorded(record)
    )
    workers = [row for pair in zip(record.processes, answers, strict=True) for row in _rows(*pair)]
    for worker in workers:
        add_room(worker["status"] or {}, rooms.get(worker["instance"], 0))
    if as_json:
        cluster = {key: value for key, value in asdict(record).items() if key != "processes"}
        document = {"cluster": cluster, "workers": workers, "sessions": sessions, "etcd_error": trouble}
        print(json.dumps(document, indent=2))
    else:
        print(_heading(record, workers))
        print_table(_worker_table(workers))
        print_troubles(
            {worker["instance"]: worker["error"] for worker in workers if _state(worker) == _SILENT}
        )
        if trouble:
            print(f"placements are not known: {harmless_line(trouble)}")
        elif sessions or any(worker["role"] == Role.ROUTER and worker["status"] for worker in workers):
            _print_sessions(sessions)
        else:
            print("sessions are not known: no router answers")
    check_all_answered([worker["instance"] for worker in workers if _state(worker) == _SILENT])


async def show_named(access: OperatorAccess, name: str, *, as_json: bool) -> None:
    """Print what one process runs and holds: of the fleet of --router, else of the local cluster.

    Raises FailedPrecondition for a local process that is down, starts or has no status, and what
    `show_process` raises.
    """
    process = None if access.routers else _recorded_process(access.run_dir, name)
    if process is not None:
        check_is_up(process, drained_by(access.run_dir, process.instance))
    try:
        client = access.fleet_client()
    except NotFound as error:
        if process is None:
            raise
        await _show_without_router(process, error.message, as_json=as_json, dial=access.dial())
    else:
        await show_process(client, name, as_json=as_json)


async def _show_without_router(process: ProcessRecord, no_router: str, *, as_json: bool, dial: Dial) -> None:
    """Print the process's answer. Raises Unavailable that says what is known, where it gives none."""
    endpoint = process.admin or process.endpoint
    answer = await ask_status(endpoint, dial)
    if isinstance(answer, SlipstreamError):
        raise Unavailable(
            f"{process.instance} (pid {process.pid}) at {endpoint} does not answer: {answer.message}; "
            f"see {process.log}; {no_router}"
        )
    print(harmless_line(f"slipstream: {no_router}; {process.instance} answers itself"), file=sys.stderr)
    print_answer(answer, endpoint, as_json=as_json)


def _recorded_process(run_dir: Path, name: str) -> ProcessRecord | None:
    """The process of that name or of that "role/name", as the supervisor records it."""
    processes = read_record(run_dir, instead="--router HOST:PORT").processes
    return next((process for process in processes if process.has_name(name)), None)


def check_is_up(process: ProcessRecord, by: str) -> None:
    """Raises FailedPrecondition that says why a process answers no question. `by`: who had it drained."""
    name, state = process.instance, process.state
    ended = "" if process.exit_code is None else f"; it {how_ended(process.exit_code)}"
    if state == ProcessState.DRAINED:
        asked = f": {by} asked for it" if by else ""
        raise FailedPrecondition(f"{name} is drained{asked}{ended}; `slipstream undrain {name}` starts it")
    if state != ProcessState.READY:
        raise FailedPrecondition(f"{name} does not serve, it is {state}{ended}; see {process.log}")
    if not process.has_worker_service:
        raise FailedPrecondition(
            f"{name} is {state} at {process.endpoint} (pid {process.pid}), and answers no status; "
            f"see {process.log}"
        )


async def _ask(
    process: ProcessRecord, dial: Dial
) -> list[worker_pb2.GetStatusResponse] | list[SlipstreamError]:
    """The status of the process; of a router that runs as several on one port, that of each.

    If none answers, why.

    The kernel chooses which of them a connection reaches: new ones are made until all have answered.
    """
    if process.pid is None or not process.has_worker_service:
        return []
    n_processes = max(len(children(process.pid)), 1) if process.role == Role.ROUTER else 1
    answers: dict[str, worker_pb2.GetStatusResponse] = {}
    trouble: list[SlipstreamError] = []
    for _ in range(1 if n_processes == 1 else _CONNECTIONS_A_PROCESS * n_processes):
        answer = await ask_status(process.admin or process.endpoint, dial)
        if isinstance(answer, SlipstreamError):
            trouble = [answer]
        else:
            answers[answer.instance] = answer
        if len(answers) == n_processes:
            break
    return [answers[instance] for instance in sorted(answers)] or trouble


async def _recorded(record: ClusterRecord) -> tuple[list[dict[str, Any]], Mapping[str, int], str | None]:
    """All placements, newest first, and the room of each kvstore node; or why they are not known."""
    try:
        client = etcd_access(record).open(timeout_s=ASK_TIMEOUT_S)
    except SlipstreamError as error:
        return [], {}, error.message
    try:
        placements = (await client.get_prefix(SESSIONS_PREFIX)).entries.values()
        members = (await client.get_prefix(WORKERS_PREFIX)).entries.values()
    except SlipstreamError as error:
        return [], {}, error.message
    finally:
        await client.close()
    return _placements(placements), kvstore_rooms(_workers(members)), None


def _workers(entries: Iterable[KeyValue]) -> Iterator[Worker]:
    for entry in entries:
        with contextlib.suppress(ValueError):
            yield decode_worker(entry.key, entry.value).worker


def _placements(entries: Iterable[KeyValue]) -> list[dict[str, Any]]:
    sessions = []
    for entry in sorted(entries, key=lambda entry: -entry.mod_revision):
        try:
            session = SessionId.from_key(entry.key)
            placement = decode_placement(entry.value, epoch=entry.mod_revision)
        except ValueError:
            continue
        row = {**structs.asdict(session), **structs.asdict(placement), "tail_hash": placement.tail_hash.hex()}
        sessions.append(row)
    return sessions


def etcd_access(record: ClusterRecord) -> EtcdAccess:
    """How the recorded cluster reaches its etcd."""
    files = {name: Path(text) for name, text in record.etcd_access.items() if name != "etcd_user"}
    tls = None
    if "etcd_ca" in files:
        tls = EtcdTls(files["etcd_ca"], files.get("etcd_certificate"), files.get("etcd_key"))
    user = record.etcd_access.get("etcd_user", "")
    return EtcdAccess(record.etcd, tls, user, files.get("etcd_password_file"))


def _rows(
    process: ProcessRecord, answers: list[worker_pb2.GetStatusResponse] | list[SlipstreamError]
) -> list[dict[str, Any]]:
    """One for each that answered, at least one; the memory of all is in the first."""
    rss = 0
    if process.pid is not None:
        rss = resident_bytes(process.pid) + sum(map(resident_bytes, children(process.pid)))
    fields = [answer_fields(answer) for answer in answers] or [{"status": None, "error": None}]
    first = {**asdict(process), "rss_bytes": rss, **fields[0]}
    others = [
        {**asdict(process), "instance": each["status"]["instance"], "rss_bytes": 0, **each}
        for each in fields[1:]
    ]
    return [first, *others]


def _heading(record: ClusterRecord, workers: Sequence[Mapping[str, Any]]) -> str:
    total_mb = (sum(worker["rss_bytes"] for worker in workers) + resident_bytes(record.supervisor_pid)) / 1e6
    ready = f"ready after {record.ready_s:.1f} s" if record.ready_s is not None else "starting"
    return (
        f"since {record.started_at}, {ready}, {total_mb:.0f} MB in all\n"
        f"gRPC {record.router_grpc}   HTTP {record.http_url}   etcd {record.etcd}"
    )


def _worker_table(workers: Sequence[Mapping[str, Any]]) -> Table:
    table = figures_table(("worker", "state"), ("pid", "restarts", "RSS MB", *LOAD_COLUMNS))
    for worker in workers:
        cells = [
            cell(worker["instance"]),
            _state(worker),
            str(worker["pid"] or "-"),
            str(worker["restarts"]),
            f"{worker['rss_bytes'] / 1e6:.0f}",
        ]
        table.add_row(*cells, *load_cells(worker["status"] or {}))
    return table


def _state(worker: Mapping[str, Any]) -> str:
    state = str(worker["state"])
    if worker["status"] is None:
        return _SILENT if worker["has_worker_service"] and state == "ready" else state
    return answer_state(worker["status"], ready=state)


def _print_sessions(sessions: Sequence[Mapping[str, Any]]) -> None:
    if not sessions:
        print("no sessions")
        return
    table = figures_table(("session", "tenant", "prefill", "decode", "kvstore"), ("blocks", "epoch"))
    for row in sessions[:_SESSION_ROWS]:
        fields = ("session", "tenant", "prefill", "decode", "kvstore", "block_count", "epoch")
        table.add_row(*(cell(str(row[field])) for field in fields))
    print_table(table, shorten_first=True)
    if len(sessions) > _SESSION_ROWS:
        print(f"and {len(sessions) - _SESSION_ROWS} more")
