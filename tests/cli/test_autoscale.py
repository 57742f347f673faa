"""`slipstream autoscale` before a router's answer and a worker that can be drained."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner

from slipstream.cli.app import app
from slipstream.cli.recommendations import as_dict
from slipstream.cluster_record import secret_file
from slipstream.enum_names import ROLES
from slipstream.errors import FailedPrecondition, InvalidArgument, NotFound
from slipstream.rpc.peer_token import TOKEN_HEADER
from slipstream.v1 import (
    autoscale_pb2,
    autoscale_pb2_grpc,
    common_pb2,
    fleet_pb2,
    fleet_pb2_grpc,
    worker_pb2,
)

PREFILL, DECODE = common_pb2.WORKER_ROLE_PREFILL, common_pb2.WORKER_ROLE_DECODE


class AdminPort(autoscale_pb2_grpc.AutoscaleServiceServicer, fleet_pb2_grpc.FleetServiceServicer):
    """A router that passes calls on to workers, on one port in a thread."""

    def __init__(self) -> None:
        self.endpoint = ""
        self.drained: list[str] = []
        self.metadata: dict[str, Any] = {}
        self.started = threading.Event()
        self.loop = asyncio.new_event_loop()
        self.stop = asyncio.Event()

    def run(self) -> None:
        self.loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        server = grpc.aio.server()
        autoscale_pb2_grpc.add_AutoscaleServiceServicer_to_server(self, server)
        fleet_pb2_grpc.add_FleetServiceServicer_to_server(self, server)
        self.endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        self.started.set()
        await self.stop.wait()
        await server.stop(None)

    async def GetRecommendations(self, request: Any, context: Any) -> Any:
        self.metadata = dict(context.invocation_metadata())
        tier = autoscale_pb2.TierRecommendation(
            role=PREFILL, replicas=2, wanted_replicas=3, min_replicas=1, max_replicas=8,
            signal=autoscale_pb2.AUTOSCALE_SIGNAL_QUEUED_S, value=2.5, target=2.0,
            reason="2.5 s of prompts queued a worker, aim 2 s",
        )  # fmt: skip
        losses = [
            autoscale_pb2.RemovalLoss(
                role=role, instance=name, endpoint=self.endpoint, lost_tokens=tokens, deletion_cost=rank
            )
            for role, name, tokens, rank in (
                (PREFILL, "prefill-1", 64, 1),
                (PREFILL, "prefill-0", 640, 2),
                (DECODE, "decode-0", 0, 1),
            )
        ]
        last = autoscale_pb2.TierRecommendation(
            role=DECODE, replicas=1, wanted_replicas=1, min_replicas=1,
            signal=autoscale_pb2.AUTOSCALE_SIGNAL_EVICTED_WANTED_MIB_PER_S, value=12345.6, target=12345.6,
            reason="64 MiB/s of evicted blocks wanted again a node (measured 0.123, counted as the aim: "
            "never scaled down), aim 64 MiB/s; at least 2 are wanted at any load",
        )  # fmt: skip
        return autoscale_pb2.GetRecommendationsResponse(
            tiers=[tier, last], losses=losses, prefill_per_decode=1.5
        )

    async def CallProcess(self, request: Any, context: Any) -> AsyncIterator[Any]:
        assert request.method == "/slipstream.v1.WorkerService/Drain"
        self.drained.append(f"{ROLES.name(request.role)}/{request.instance}")
        yield fleet_pb2.CallProcessResponse(message=worker_pb2.DrainResponse().SerializeToString())


@pytest.fixture
def admin() -> Iterator[AdminPort]:
    port = AdminPort()  # type: ignore[abstract]
    thread = threading.Thread(target=port.run)
    thread.start()
    assert port.started.wait(60)
    yield port
    port.loop.call_soon_threadsafe(port.stop.set)
    thread.join(60)


def invoke(admin: AdminPort, *arguments: str, answer: str = "") -> Any:
    return CliRunner().invoke(app, ["autoscale", "--endpoint", admin.endpoint, *arguments], input=answer)


def test_the_table_has_each_tier_and_explains_it(admin: AdminPort) -> None:
    plain = invoke(admin).output
    assert "prefill" in plain
    assert "queued" not in plain
    lines = invoke(admin, "--explain").output.splitlines()
    (row,) = [line.split() for line in lines if line.startswith("prefill")]
    assert row[:6] == ["prefill", "2", "3", "2.5", "2", "queued_s:"]
    assert "1.5 prefill workers for each decode worker" in lines[-1]


def test_a_tier_stands_beside_the_first_line_of_its_reason(admin: AdminPort) -> None:
    lines = invoke(admin, "--explain").output.splitlines()
    (first,) = [line for line in lines if "evicted_wanted_mib_per_s:" in line]
    assert first.startswith("decode")


def test_no_line_of_the_reasons_exceeds_120_columns(admin: AdminPort) -> None:
    lines = invoke(admin, "--explain").output.splitlines()
    assert any("never scaled down" in line for line in lines)  # the end of the longest reason
    assert max(map(len, lines)) <= 120


def test_json_has_the_figures_and_the_losses(admin: AdminPort) -> None:
    said = json.loads(invoke(admin, "--json").output)
    assert [(tier["role"], tier["signal"], tier["wanted_replicas"]) for tier in said["tiers"]] == [
        ("prefill", "queued_s", 3),
        ("decode", "evicted_wanted_mib_per_s", 1),
    ]
    assert [(loss["instance"], loss["lost_tokens"], loss["deletion_cost"]) for loss in said["losses"]] == [
        ("prefill-1", 64, 1),
        ("prefill-0", 640, 2),
        ("decode-0", 0, 1),
    ]
    assert said["prefill_per_decode"] == 1.5


def test_a_signal_of_a_later_contract_is_shown_as_unknown() -> None:
    tier = autoscale_pb2.TierRecommendation(role=PREFILL, signal=99, value=2.5)  # type: ignore[arg-type]
    sent = autoscale_pb2.GetRecommendationsResponse(tiers=[tier]).SerializeToString()
    [shown] = as_dict(autoscale_pb2.GetRecommendationsResponse.FromString(sent))["tiers"]
    assert (shown["signal"], shown["value"]) == ("unknown", 2.5)


def test_an_endpoint_is_asked_with_the_secret_of_the_run_directory(admin: AdminPort, tmp_path: Path) -> None:
    secret_file(tmp_path).write_text("0123456789abcdef" * 4)
    invoke(admin, "--run-dir", str(tmp_path))
    assert TOKEN_HEADER in admin.metadata


def test_an_endpoint_is_asked_without_a_secret_where_there_is_none(admin: AdminPort, tmp_path: Path) -> None:
    invoke(admin, "--run-dir", str(tmp_path))
    assert TOKEN_HEADER not in admin.metadata


def test_drain_one_drains_the_least_loss_and_asks_before(admin: AdminPort) -> None:
    refused = invoke(admin, "--drain-one", "prefill", answer="n\n")
    assert "prefill-1" in refused.output
    assert not admin.drained
    drained = invoke(admin, "--drain-one", "prefill", "--yes")
    assert "prefill-1 is drained" in drained.output
    assert admin.drained == ["prefill/prefill-1"]


@pytest.mark.parametrize(
    ("tier", "error"),
    [("decode", FailedPrecondition), ("drafter", NotFound), ("prefil", InvalidArgument)],
)
def test_drain_one_leaves_the_least_number(admin: AdminPort, tier: str, error: type[Exception]) -> None:
    answer = invoke(admin, "--drain-one", tier, "--yes")
    assert isinstance(answer.exception, error)
    assert not admin.drained
