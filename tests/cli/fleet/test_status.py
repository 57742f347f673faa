"""`slipstream status NAME`: one process with what requests hold there, by way of a router."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from slipstream.cli.app import app
from slipstream.cli.status import status_dict
from slipstream.errors import InvalidArgument, NotFound, SlipstreamError, Unavailable
from slipstream.v1 import common_pb2, fleet_pb2, worker_pb2
from tests.cli.fleet.fleet_port import DRAINING, SILENT, FleetPort, process


@pytest.fixture
def port() -> Iterator[FleetPort]:
    with FleetPort(process("router"), process("decode", requests_running=2, blocks_held=5)).serving() as port:
        yield port


def invoke(port: FleetPort, *arguments: str) -> Any:
    return CliRunner().invoke(app, ["status", *arguments, "--router", port.endpoint])


def test_the_ledger_of_a_named_process_comes_through_the_router(port: FleetPort) -> None:
    port.held = worker_pb2.Ledger(sequences=2, blocks_held=5)
    port.processes["decode-0"].state = DRAINING
    shown = invoke(port, "decode/decode-0")
    assert shown.exit_code == 0, shown.exception
    assert "decode-0 10.0.0.0:7000 draining" in " ".join(shown.output.split())
    assert shown.output.endswith("up for 125 s; requests hold 2 sequences, 5 blocks held\n")
    assert [call[:2] for call in port.calls] == [("decode-0", "GetStatus")]


def test_json_has_the_shape_of_endpoints_with_ledger_and_counters(port: FleetPort) -> None:
    port.held = worker_pb2.Ledger(transfers=1)
    (row,) = json.loads(invoke(port, "decode-0", "--json").output)["workers"]
    assert (row["endpoint"], row["error"]) == ("10.0.0.0:7000", None)
    assert row["status"]["ledger"]["transfers"] == "1"
    assert row["status"]["counters"] == {"slipstream_kv_blocks_leaked": 3.0}


def test_json_has_enums_by_the_names_that_people_read() -> None:
    said = worker_pb2.GetStatusResponse(
        role=common_pb2.WORKER_ROLE_KVSTORE,
        fingerprint=common_pb2.Fingerprint(kv_dtype=common_pb2.KV_DTYPE_BFLOAT16),
        evictions=[
            worker_pb2.TierEviction(
                tier=common_pb2.CACHE_TIER_DRAM, policies=[worker_pb2.EVICTION_POLICY_LRU]
            ),
            worker_pb2.TierEviction(tier=common_pb2.CACHE_TIER_NVME),
        ],
    )
    status = status_dict(said)
    assert (status["role"], status["transport"]) == ("kvstore", "none")
    assert status["fingerprint"]["kv_dtype"] == "bfloat16"
    assert status["evictions"] == [
        {"tier": "dram", "policies": ["LRU"]},
        {"tier": "nvme", "policies": []},
    ]
    eviction = worker_pb2.TierEviction(policies=[99])  # type: ignore[list-item]
    later = status_dict(worker_pb2.GetStatusResponse(evictions=[eviction]))
    assert later["evictions"][0]["policies"] == ["unknown"] and "fingerprint" not in later


def test_an_idle_process_holds_nothing(port: FleetPort) -> None:
    assert "requests hold nothing" in invoke(port, "decode-0").output


def test_a_process_that_does_not_answer_is_named(port: FleetPort) -> None:
    port.processes["decode-0"].state = SILENT
    refused = invoke(port, "decode-0").exception
    assert isinstance(refused, Unavailable)
    assert refused.message.startswith("decode-0 at 10.0.0.0:7000 does not answer")


def test_an_unknown_name_and_two_ways_to_name_a_process_are_refused(port: FleetPort) -> None:
    assert isinstance(invoke(port, "decode-7").exception, NotFound)
    both = invoke(port, "decode-0", "--endpoint", "127.0.0.1:1").exception
    assert isinstance(both, InvalidArgument) and both.field == "--endpoint"
    assert not port.calls


@pytest.mark.parametrize(("room", "shown"), [(0, "-"), (1024, "1024")])
def test_an_empty_kvstore_node_has_the_room_that_the_router_knows(
    port: FleetPort, room: int, shown: str
) -> None:
    """The node itself does not know the size of a block yet."""
    port.processes["kvstore-0"] = process("kvstore", requests_running=1, blocks_free=room)
    port.reports["kvstore-0"] = worker_pb2.LoadReport(requests_running=1)
    assert invoke(port, "kvstore-0").output.splitlines()[-2].split()[-3:] == ["0", "0", shown]
    (row,) = json.loads(invoke(port, "kvstore-0", "--json").output)["workers"]
    assert row["status"]["load"]["blocks_free"] == str(room)
    fleet = next(line for line in invoke(port).output.splitlines() if line.startswith("kvstore-0"))
    assert fleet.split()[-3:] == ["0", "0", shown]


class GarbagePort(FleetPort):
    """Passes on what its processes send, which is no message."""

    async def CallProcess(self, request: Any, context: Any) -> AsyncIterator[fleet_pb2.CallProcessResponse]:
        yield fleet_pb2.CallProcessResponse(message=b"\xff\xff\xff")


@pytest.mark.parametrize(
    "command", ["status kvstore-0", "drain kvstore-0", "kv stat", "kv ls", "kv drop --all"]
)
def test_a_process_that_sends_no_message_is_named_in_an_error(command: str) -> None:
    with GarbagePort(process("kvstore", requests_running=1)).serving() as garbage:
        done = CliRunner().invoke(app, [*command.split(), "--router", garbage.endpoint])
    assert isinstance(done.exception, SlipstreamError | None), done.exception
    said = done.output + (done.exception.message if done.exception is not None else "")
    assert "kvstore-0" in said and ("no answer" in said or "does not answer" in said), said
