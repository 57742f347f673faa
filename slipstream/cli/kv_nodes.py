"""The KV store's nodes as the command line sees them, and asking all of them the same."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import grpc

from slipstream.cluster_record import ClusterRecord, read_record
from slipstream.errors import NotFound
from slipstream.rpc.dial import Dial
from slipstream.rpc.rpc_errors import from_rpc_error

AnswerT = TypeVar("AnswerT")
_ROLE = "kvstore"


@dataclass(frozen=True, slots=True)
class NodeReply(Generic[AnswerT]):
    """What a node said, or why it said nothing."""

    node: str
    said: AnswerT | None
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Nodes:
    """Endpoint by name, and how to talk to them."""

    endpoints: Mapping[str, str]
    dial: Dial


def kv_nodes(run_dir: Path, wanted: Sequence[str], *, dial: Dial) -> Nodes:
    """Those wanted, or all. A wanted host:port needs no run directory. NotFound for an unknown name."""
    direct = {text: text for text in wanted if ":" in text}
    named = [text for text in wanted if ":" not in text]
    if wanted and not named:
        return Nodes(direct, dial)
    record = read_record(run_dir, instead="--node HOST:PORT")
    return Nodes({**_endpoints(record, named), **direct}, dial)


def _endpoints(record: ClusterRecord, named: Sequence[str]) -> dict[str, str]:
    processes = [process for process in record.processes if process.role == _ROLE]
    running = {process.instance: process.endpoint for process in processes}
    for name in named:
        if name not in running:
            raise NotFound(f"no KV store node {name!r}; there are {', '.join(running) or 'none'}")
    return {name: running[name] for name in named} if named else running


async def ask_all(
    nodes: Nodes, ask: Callable[[grpc.aio.Channel], Awaitable[AnswerT]]
) -> list[NodeReply[AnswerT]]:
    """Ask every node at once, in the order given."""

    async def one(name: str, endpoint: str) -> NodeReply[AnswerT]:
        async with nodes.dial(endpoint) as channel:
            try:
                return NodeReply(name, await ask(channel))
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    return NodeReply(name, None, "is no KV store node")
                return NodeReply(name, None, from_rpc_error(error).message)

    return list(await asyncio.gather(*(one(name, endpoint) for name, endpoint in nodes.endpoints.items())))
