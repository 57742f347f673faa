"""The processes of the fleet as a router shows them: the room of a kvstore node without a block."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from libs.common.cluster.worker_record import FleetSnapshot, Role, Worker
from libs.common.fleet_bounds import MAX_SHOWN_PROCESSES
from services.router.operators.fleet_report import (
    DRAINING,
    READY,
    SILENT,
    find_process,
    fleet_processes,
    shown_members,
)
from slipstream.cli.top.rows import view_of
from slipstream.v1 import fleet_pb2, worker_pb2

DECODE = Worker(Role.DECODE, "decode-0", "127.0.0.1:1", "1", capacity={"block_bytes": 65_536})
STORE = Worker(Role.KVSTORE, "kvstore-0", "127.0.0.1:2", "1", capacity={"dram_bytes": 64 << 20})


def store_of(report: worker_pb2.LoadReport | None, *workers: Worker) -> fleet_pb2.FleetProcess:
    """The node as an operator sees it, beside these workers. It drains: that takes no link to it."""
    members = FleetSnapshot.of(workers, leaving=[STORE])
    (found,) = fleet_processes(members, [], routers={}, leaving=lambda _: report)
    return found


def test_a_node_without_a_block_shows_the_room_of_its_memory() -> None:
    report = worker_pb2.LoadReport(requests_running=1)
    found = store_of(report, DECODE)
    assert found.load == worker_pb2.LoadReport(requests_running=1, blocks_free=1024)
    assert report == worker_pb2.LoadReport(requests_running=1), "the router's own copy stays as it came"
    (row,) = view_of(fleet_pb2.GetFleetResponse(processes=[found])).processes
    assert row.kv_share == 0.0, "top shows 0 %"


@pytest.mark.parametrize("blocks", [{"blocks_free": 7}, {"blocks_cached": 900}, {"blocks_held": 1}])
def test_a_node_with_blocks_shows_what_it_reports(blocks: dict[str, Any]) -> None:
    assert store_of(worker_pb2.LoadReport(**blocks), DECODE).load == worker_pb2.LoadReport(**blocks)


def test_no_room_is_made_up() -> None:
    assert not store_of(None, DECODE).HasField("load")
    assert store_of(worker_pb2.LoadReport()).load == worker_pb2.LoadReport(), "no worker states a size"


def test_a_router_is_silent_without_a_report_and_drains_by_its_own() -> None:
    members = FleetSnapshot.of(Worker(Role.ROUTER, name, "127.0.0.1:1", "1") for name in "abc")
    routers = {"b": worker_pb2.LoadReport(), "c": worker_pb2.LoadReport(draining=True)}
    found = fleet_processes(members, [], routers=routers, leaving=lambda _: None)
    assert [process.state for process in found] == [SILENT, READY, DRAINING]


@pytest.mark.parametrize("name", ["a", "z"])
def test_a_router_shows_a_bounded_number_of_records_and_its_own_in_any_case(name: str) -> None:
    own = Worker(Role.ROUTER, name, "127.0.0.1:1", "mine")
    false = [Worker(Role.ROUTER, f"r-{number}", "h:1", "i") for number in range(2 * MAX_SHOWN_PROCESSES)]
    leaving = [Worker(Role.DECODE, f"d-{number}", "h:1", "i") for number in range(2 * MAX_SHOWN_PROCESSES)]
    stated = replace(own, endpoint="evil.test:1")
    seen = shown_members(FleetSnapshot.of([*false, stated, DECODE], leaving=leaving), own)
    assert (
        len({worker.key for worker in seen.with_role(Role.ROUTER)})
        == len(seen.leaving)
        == MAX_SHOWN_PROCESSES
    )
    assert [worker for worker in seen.workers if worker.key == own.key] == [own]
    assert find_process(seen, "decode", DECODE.instance) == DECODE
