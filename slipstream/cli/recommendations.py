"""A router's recommendations as tables and JSON, and draining the worker that is missed least."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc
import typer
from google.protobuf.json_format import MessageToDict

from slipstream.cli.fleet.routed_channel import RoutedDial
from slipstream.cli.port_error import port_error
from slipstream.cli.tables import figures_table, print_table
from slipstream.enum_names import ROLES, value_name
from slipstream.errors import FailedPrecondition, NotFound
from slipstream.rpc.dial import OpenChannel
from slipstream.v1 import autoscale_pb2, autoscale_pb2_grpc, worker_pb2, worker_pb2_grpc

_ASK_TIMEOUT_S = 10.0
_DRAIN_TIMEOUT_S = 300.0
_REASON_WIDTH = 76  # with the figures beside it, 120 columns

_Answer = TypeVar("_Answer")


def as_dict(answer: autoscale_pb2.GetRecommendationsResponse) -> dict[str, Any]:
    """The answer as JSON has it."""
    said = MessageToDict(answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    for row, message in zip(said["tiers"], answer.tiers, strict=True):
        row["role"], row["signal"] = ROLES.name(message.role), _signal_name(message)
    for row, loss in zip(said["losses"], answer.losses, strict=True):
        row.update(role=ROLES.name(loss.role), lost_tokens=loss.lost_tokens, unique_blocks=loss.unique_blocks)
    return said


def least_loss(
    answer: autoscale_pb2.GetRecommendationsResponse, tier: str
) -> tuple[autoscale_pb2.RemovalLoss, int]:
    """(the worker of the tier to drain, how many remain). Raises NotFound, or FailedPrecondition at the
    tier's least number."""
    losses = [loss for loss in answer.losses if ROLES.name(loss.role) == tier]
    if not losses:
        raise NotFound(f"no {tier} worker is there to drain")
    least = next((row.min_replicas for row in answer.tiers if ROLES.name(row.role) == tier), 0)
    if len(losses) <= least:
        raise FailedPrecondition(f"{len(losses)} {tier} is there, and at least {least} must remain")
    return losses[0], len(losses) - 1


async def _recommendations(admin: str, dial: OpenChannel) -> autoscale_pb2.GetRecommendationsResponse:
    def ask(channel: grpc.aio.Channel) -> Awaitable[autoscale_pb2.GetRecommendationsResponse]:
        stub: autoscale_pb2_grpc.AutoscaleServiceAsyncStub = autoscale_pb2_grpc.AutoscaleServiceStub(channel)
        return stub.GetRecommendations(autoscale_pb2.GetRecommendationsRequest(), timeout=_ASK_TIMEOUT_S)

    return await _call(admin, dial, ask)


async def _drain(worker: str, dial: OpenChannel) -> worker_pb2.DrainResponse:
    def drain(channel: grpc.aio.Channel) -> Awaitable[worker_pb2.DrainResponse]:
        stub: worker_pb2_grpc.WorkerServiceAsyncStub = worker_pb2_grpc.WorkerServiceStub(channel)
        return stub.Drain(worker_pb2.DrainRequest(), timeout=_DRAIN_TIMEOUT_S)

    return await _call(worker, dial, drain)


async def _call(
    target: str, dial: OpenChannel, ask: Callable[[grpc.aio.Channel], Awaitable[_Answer]]
) -> _Answer:
    async with dial(target) as channel:
        try:
            return await ask(channel)
        except grpc.aio.AioRpcError as error:
            raise port_error(error) from None


def show_recommendations(admin: str, *, dial: OpenChannel, explain: bool, as_json: bool) -> None:
    """Print what the router at `admin` recommends."""
    answer = asyncio.run(_recommendations(admin, dial))
    if as_json:
        print(json.dumps(as_dict(answer), indent=2))
    else:
        _print(answer, explain=explain)


def drain_least(admin: str, tier: str, *, dial: OpenChannel, confirmed: bool) -> None:
    """Drain the worker of the tier whose loss costs least, after a question unless `confirmed`."""
    loss, remaining = least_loss(asyncio.run(_recommendations(admin, dial)), tier)
    print(
        f"{loss.instance} at {loss.endpoint}: {loss.requests} requests, {loss.sessions} sessions, "
        f"{loss.unique_blocks} blocks cached nowhere else; {loss.lost_tokens} tokens would be computed again"
    )
    if not confirmed and not typer.confirm(f"Drain {loss.instance}? {remaining} of its tier remain."):
        return
    worker = f"{tier}/{loss.instance}"
    answer = asyncio.run(_drain(worker, RoutedDial(admin, dial)))
    held = sum(value for _, value in answer.ledger.ListFields())
    print(f"{loss.instance} is drained" + ("" if not held else f" and still holds {held}: it goes on"))


def _signal_name(row: autoscale_pb2.TierRecommendation) -> str:
    return value_name(autoscale_pb2.AutoscaleSignal, row.signal)


def _print(answer: autoscale_pb2.GetRecommendationsResponse, *, explain: bool) -> None:
    names, figures = ["tier"], ["replicas", "wanted"]
    if explain:
        figures += ["value", "target"]
    table = figures_table(names, figures)
    table.columns[0].vertical = "top"  # beside the first line of a long reason
    if explain:
        table.add_column("reason", max_width=_REASON_WIDTH, vertical="bottom")
    for row in answer.tiers:
        cells = [ROLES.name(row.role), str(row.replicas), str(row.wanted_replicas)]
        if explain:
            cells += [f"{row.value:.3g}", f"{row.target:.3g}", f"{_signal_name(row)}: {row.reason}"]
        table.add_row(*cells)
    print_table(table)
    if explain and answer.prefill_per_decode:
        print(f"the traffic wants {answer.prefill_per_decode:.2g} prefill workers for each decode worker")
