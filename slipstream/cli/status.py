"""`slipstream status`: what processes say of themselves, at their ports or by way of a router."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict
from rich.table import Table

from slipstream.cli.chat.harmless_text import harmless_line
from slipstream.cli.fleet.fleet_client import ASK_TIMEOUT_S as ROUTED_TIMEOUT_S
from slipstream.cli.fleet.fleet_client import FleetClient, fleet_dict, key_of
from slipstream.cli.port_error import port_error
from slipstream.cli.tables import cell, figures_table, print_table
from slipstream.enum_names import CACHE_TIERS, EVICTION_POLICIES, ROLES, TRANSPORTS, value_name
from slipstream.errors import DeadlineExceeded, SlipstreamError, Unavailable
from slipstream.rpc.dial import OpenChannel
from slipstream.rpc.rpc_errors import received
from slipstream.v1 import common_pb2, worker_pb2, worker_pb2_grpc

ASK_TIMEOUT_S = 2.0
_POOL_UNAVAILABLE = "slipstream_kvstore_pool_unavailable"
# Columns of the worker table: heading and field of a LoadReport.
LOAD_COLUMNS = {
    "runs": "requests_running",
    "waits": "requests_waiting",
    "prefill tokens": "prefill_tokens_in_flight",
    "decode tokens": "decode_tokens_in_flight",
    "blocks held": "blocks_held",
    "cached": "blocks_cached",
    "free": "blocks_free",
}


async def show_endpoints(endpoints: Sequence[str], *, as_json: bool, dial: OpenChannel) -> None:
    """Print the status of the process at each endpoint. Raises Unavailable if one did not answer."""
    answers = await asyncio.gather(*(ask_status(endpoint, dial) for endpoint in endpoints))
    rows = [{"endpoint": at, **answer_fields(answer)} for at, answer in zip(endpoints, answers, strict=True)]
    if as_json:
        print(json.dumps({"workers": rows}, indent=2))
    else:
        print_table(_table(endpoints, [row["status"] for row in rows]))
    if troubles := list(trouble_lines({row["endpoint"]: row["error"] for row in rows})):
        raise Unavailable(f"no answer from {'; '.join(troubles)}")


def answer_fields(answer: worker_pb2.GetStatusResponse | SlipstreamError) -> dict[str, Any]:
    """`status`, or why there is none in `error`."""
    if isinstance(answer, SlipstreamError):
        return {"status": None, "error": answer.message}
    return {"status": status_dict(answer), "error": None}


def print_troubles(troubles: Mapping[str, str | None]) -> None:
    """One line for each reason of the processes without an answer."""
    for line in trouble_lines(troubles):
        print(line)


def trouble_lines(troubles: Mapping[str, str | None]) -> Iterator[str]:
    """The processes of each reason, and the reason."""
    for trouble in dict.fromkeys(filter(None, troubles.values())):
        names = ", ".join(name for name, text in troubles.items() if text == trouble)
        yield harmless_line(f"{names}: {trouble}")


def check_all_answered(silent: Sequence[str]) -> None:
    """Raises Unavailable that names the processes without an answer, after the others were printed."""
    if silent:
        raise Unavailable(f"no answer from {', '.join(silent)}")


def _table(endpoints: Sequence[str], statuses: Sequence[Mapping[str, Any] | None]) -> Table:
    table = figures_table(("worker", "endpoint", "state"), ("RSS MB", *LOAD_COLUMNS))
    for endpoint, status in zip(endpoints, statuses, strict=True):
        if status is None:
            table.add_row("-", cell(endpoint), "no answer", "-", *load_cells({}))
        else:
            rss_mb = f"{int(status['rss_bytes']) / 1e6:.0f}"
            name, state = cell(status["instance"]), answer_state(status)
            table.add_row(name, cell(endpoint), state, rss_mb, *load_cells(status))
    return table


async def show_fleet(client: FleetClient, *, as_json: bool) -> None:
    """Print the processes that a router sees. Raises what it answers."""
    fleet = fleet_dict(await client.get())
    if as_json:
        print(json.dumps(fleet, indent=2))
        return
    table = figures_table(("worker", "endpoint", "state"), LOAD_COLUMNS)
    for row in fleet["processes"]:
        table.add_row(cell(row["instance"]), cell(row["endpoint"]), row["state"], *load_cells(row))
    print(harmless_line(f"{fleet['model']}, as {fleet['router']} sees it"))
    print_table(table)


async def show_process(client: FleetClient, name: str, *, as_json: bool) -> None:
    """Print what one process of the fleet runs and holds, by way of the router: an API key opens that.

    Raises NotFound, InvalidArgument for a name that several tiers have, Unavailable for a process that does
    not answer, and what the process answers.
    """
    process = await client.find(name)
    async with client.process_dial()(key_of(process)) as channel:
        stub: worker_pb2_grpc.WorkerServiceAsyncStub = worker_pb2_grpc.WorkerServiceStub(channel)
        try:
            answer = await stub.GetStatus(worker_pb2.GetStatusRequest(), timeout=ROUTED_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            failure = port_error(error)
            if isinstance(failure, Unavailable | DeadlineExceeded):
                raise Unavailable(
                    f"{process.instance} at {process.endpoint} does not answer; `status` without a name has "
                    "its last load report"
                ) from None
            raise failure from None
    print_answer(answer, process.endpoint, blocks_free=process.load.blocks_free, as_json=as_json)


def print_answer(
    answer: worker_pb2.GetStatusResponse, endpoint: str, *, blocks_free: int = 0, as_json: bool
) -> None:
    """Print what one process runs and holds. `blocks_free`: the room that a router knows of it."""
    status = status_dict(answer)
    add_room(status, blocks_free)
    if as_json:
        print(json.dumps({"workers": [{"endpoint": endpoint, "status": status, "error": None}]}, indent=2))
        return
    print_table(_table([endpoint], [status]))
    print(f"up for {answer.uptime_ms / 1e3:.0f} s; {held_words(answer.ledger)}")


def held_words(ledger: worker_pb2.Ledger) -> str:
    """What requests hold, as a line shows it."""
    held = [f"{count} {field.name.replace('_', ' ')}" for field, count in ledger.ListFields()]
    return f"requests hold {', '.join(held) or 'nothing'}"


async def ask_status(endpoint: str, dial: OpenChannel) -> worker_pb2.GetStatusResponse | SlipstreamError:
    """The status of the process, or why it gives none within ASK_TIMEOUT_S."""
    async with dial(endpoint) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        try:
            answer = await stub.GetStatus(worker_pb2.GetStatusRequest(), timeout=ASK_TIMEOUT_S)
            return received(answer, sender="the process")
        except grpc.aio.AioRpcError as error:
            return port_error(error)
        except Unavailable as error:
            return error


def status_dict(answer: worker_pb2.GetStatusResponse) -> dict[str, Any]:
    """The answer as JSON has it, fields that are not set included."""
    said = MessageToDict(answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    said.update(role=ROLES.name(answer.role), transport=TRANSPORTS.name(answer.transport))
    if answer.HasField("fingerprint"):
        said["fingerprint"]["kv_dtype"] = value_name(common_pb2.KvDtype, answer.fingerprint.kv_dtype)
    said["evictions"] = [
        {
            "tier": CACHE_TIERS.name(each.tier),
            "policies": [EVICTION_POLICIES.name(policy) for policy in each.policies],
        }
        for each in answer.evictions
    ]
    return said


def answer_state(status: Mapping[str, Any], *, ready: str = "ready") -> str:
    """The state that an answer shows; `ready` where it shows nothing particular."""
    if status["draining"]:
        return "draining"
    if status["counters"].get(_POOL_UNAVAILABLE):
        return f"{ready}, pool unavailable"
    return ready


def load_cells(status: Mapping[str, Any]) -> list[str]:
    """The cells below LOAD_COLUMNS; "-" where the process did not answer, or does not know its room yet."""
    load = status.get("load") or {}
    if _lacks_room(status):
        load = {**load, "blocks_free": "-"}
    return [str(load.get(field, "-")) for field in LOAD_COLUMNS.values()]


def add_room(status: Mapping[str, Any], n_blocks: int) -> None:
    """Let a kvstore node without a block have this room: it learns the size of a block with the first one."""
    if n_blocks and _lacks_room(status):
        status["load"]["blocks_free"] = str(n_blocks)


def _lacks_room(status: Mapping[str, Any]) -> bool:
    load = status.get("load")
    if status.get("role") != "kvstore" or not load:
        return False
    return not any(int(load[field]) for field in ("blocks_free", "blocks_cached", "blocks_held"))
