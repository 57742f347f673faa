"""The KV store's nodes as the command line sees them, and asking all of them the same."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import grpc

from slipstream.cli.access import OperatorAccess
from slipstream.cli.fleet.fleet_client import key_of
from slipstream.cluster_record import ClusterRecord, read_record
from slipstream.enum_names import ROLES
from slipstream.errors import InvalidArgument, NotFound, SlipstreamError
from slipstream.rpc.dial import OpenChannel
from slipstream.rpc.rpc_errors import from_rpc_error

AnswerT = TypeVar("AnswerT")
_ROLE = "kvstore"


@dataclass(frozen=True, slots=True)
class NodeReply(Generic[AnswerT]):
    """The reply of a node, or why there is none."""

    node: str
    said: AnswerT | None
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Nodes:
    """The targets of `dial`, by name: an endpoint, or "role/instance" through a router."""

    endpoints: Mapping[str, str]
    dial: OpenChannel


def kv_nodes(access: OperatorAccess, wanted: Sequence[str]) -> Nodes:
    """The nodes wanted, or all: those of --router, else of the local cluster.

    A wanted host:port needs neither. Raises NotFound for an unknown name.
    """
    direct = {text: text for text in wanted if ":" in text}
    named = [text for text in wanted if ":" not in text]
    if wanted and not named:
        return Nodes(direct, access.dial())
    if access.routers:
        return _routed(access, named, direct)
    record = read_record(access.run_dir, instead="--router or --node HOST:PORT")
    return Nodes({**_endpoints(record, named), **direct}, access.dial())


def _routed(access: OperatorAccess, named: Sequence[str], direct: Mapping[str, str]) -> Nodes:
    if direct:
        raise InvalidArgument("--node", "with --router is the name of a node, as discovery has it")
    client = access.fleet_client()
    fleet = asyncio.run(client.get())
    nodes = {each.instance: key_of(each) for each in fleet.processes if ROLES.name(each.role) == _ROLE}
    return Nodes(_chosen(nodes, named), client.process_dial())


def _endpoints(record: ClusterRecord, named: Sequence[str]) -> dict[str, str]:
    processes = [process for process in record.processes if process.role == _ROLE]
    running = {process.instance: process.endpoint for process in processes}
    return _chosen(running, named)


def _chosen(nodes: dict[str, str], named: Sequence[str]) -> dict[str, str]:
    """The named ones, each by its name or "kvstore/name", or all. Raises NotFound."""
    chosen = {}
    for name in named:
        instance = name.removeprefix(f"{_ROLE}/")
        if instance not in nodes:
            raise NotFound(f"no KV store node {name!r}; there are {', '.join(nodes) or 'none'}")
        chosen[instance] = nodes[instance]
    return chosen if named else nodes


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
            except SlipstreamError as error:  # another node's answer is worth showing all the same
                return NodeReply(name, None, error.message)

    return list(await asyncio.gather(*(one(name, endpoint) for name, endpoint in nodes.endpoints.items())))
