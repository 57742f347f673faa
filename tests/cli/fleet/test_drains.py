"""`drain`, `undrain`, `restart`, `status` and `kv` through the admin port of a router."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from slipstream.cli import installed_commands
from slipstream.cli.app import app, build_app
from slipstream.cli.fleet.routed_channel import RoutedDial
from slipstream.cluster_record import secret_file
from slipstream.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument, NotFound, Unavailable
from slipstream.rpc.dial import PLAIN_DIAL
from slipstream.rpc.peer_token import TOKEN_HEADER
from slipstream.v1 import fleet_pb2, worker_pb2, worker_pb2_grpc
from tests.cli.fleet.fleet_port import DRAINING, READY, SILENT, FleetPort, process


@pytest.fixture
def port() -> Iterator[FleetPort]:
    workers = [process("decode", n, requests_running=n, blocks_held=5) for n in range(2)]
    with FleetPort(process("router"), process("prefill"), *workers).serving() as serving:
        yield serving


def invoke(port: FleetPort, *arguments: str, env: dict[str, str] | None = None) -> Any:
    return CliRunner().invoke(app, [*arguments, "--router", port.endpoint], env=env)


def test_drain_finds_the_process_by_its_name_and_undrain_takes_it_back(port: FleetPort) -> None:
    drained = invoke(port, "drain", "decode-1")
    assert "drained decode-1" in drained.output and "runs on" in drained.output
    assert port.processes["decode-1"].state == DRAINING
    assert invoke(port, "undrain", "decode/decode-1").output == "decode-1 takes work\n"
    assert port.processes["decode-1"].state == READY
    assert [call[:2] for call in port.calls] == [("decode-1", "Drain"), ("decode-1", "Undrain")]


def test_a_drain_that_is_not_over_says_what_is_held(port: FleetPort) -> None:
    port.held = worker_pb2.Ledger(sequences=2)
    late = invoke(port, "drain", "decode-1", "--timeout-s", "5")
    assert isinstance(late.exception, DeadlineExceeded)
    assert "takes no new work, and holds 2 sequences" in late.exception.message


def test_an_unknown_name_lists_those_that_there_are(port: FleetPort) -> None:
    answer = invoke(port, "drain", "decode-7")
    assert isinstance(answer.exception, NotFound)
    assert "router-0, prefill-0, decode-0, decode-1" in answer.exception.message


def test_a_name_of_two_tiers_needs_its_tier(port: FleetPort) -> None:
    twin = process("kvstore")
    twin.instance = "decode-0"
    port.processes["kvstore/decode-0"] = twin
    answer = invoke(port, "drain", "decode-0")
    assert isinstance(answer.exception, InvalidArgument)
    assert "decode/decode-0 or kvstore/decode-0" in answer.exception.message


def test_restart_waits_for_the_next_run_of_the_process(port: FleetPort) -> None:
    assert invoke(port, "restart", "decode-0").output.startswith("restarted decode-0 in ")
    assert port.processes["decode-0"].incarnation == "1+"
    (call,) = port.calls
    assert worker_pb2.DrainRequest.FromString(call[2]).exit


@pytest.mark.parametrize(
    ("changes", "seen"),
    [
        ({"restarts": False}, "has ended and is not back: a process manager must start it again"),
        ({"ends": False}, "still runs: it has requests to end"),
        ({"state_again": SILENT}, "was started again and is not ready"),
    ],
)
def test_restart_says_how_far_the_process_came(port: FleetPort, changes: dict[str, Any], seen: str) -> None:
    vars(port).update(changes)
    answer = invoke(port, "restart", "decode-0", "--timeout-s", "0.2")
    assert isinstance(answer.exception, DeadlineExceeded)
    assert f"decode-0 {seen}" in answer.exception.message


def test_a_rolling_restart_takes_one_of_each_tier_and_the_asked_router_last_of_them(port: FleetPort) -> None:
    answer = invoke(port, "restart", "--rolling")
    assert answer.exit_code == 0, answer.exception
    assert [call[0] for call in port.calls] == ["prefill-0", "decode-0", "router-0", "decode-1"]
    assert isinstance(invoke(port, "restart").exception, FailedPrecondition)


def test_a_rolling_restart_leaves_a_drained_process_as_it_is(port: FleetPort) -> None:
    assert invoke(port, "drain", "decode-0").exit_code == 0
    port.calls.clear()
    answer = invoke(port, "restart", "--rolling")
    assert answer.exit_code == 0, answer.exception
    assert [call[0] for call in port.calls] == ["prefill-0", "router-0", "decode-1"]
    assert port.processes["decode-0"].state == DRAINING
    skipped = "skipped decode-0: it is drained; `slipstream undrain decode-0` lets it take work again"
    assert skipped in answer.output.splitlines()
    assert invoke(port, "restart", "decode-0").output.startswith("restarted decode-0 in ")


def test_status_shows_each_process_and_its_load(port: FleetPort) -> None:
    lines = invoke(port, "status").output.splitlines()
    (row,) = [line.split() for line in lines if line.startswith("decode-1")]
    assert row[1:4] == ["10.0.0.1:7000", "ready", "1"]
    said = json.loads(invoke(port, "status", "--json").output)
    assert [each["role"] for each in said["processes"]] == ["router", "prefill", "decode", "decode"]
    assert said["processes"][0]["load"] is None


def test_another_router_answers_where_the_first_does_not(port: FleetPort) -> None:
    shown = CliRunner().invoke(app, ["status", "--router", f"127.0.0.1:1,{port.endpoint}"])
    assert "decode-1" in shown.output
    none = CliRunner().invoke(app, ["status", "--router", "127.0.0.1:1"])
    assert isinstance(none.exception, Unavailable)


@pytest.mark.parametrize("where", ["flag", "file", "variable", "secret"])
def test_the_credential_is_the_key_or_the_secret_that_is_given(
    port: FleetPort, tmp_path: Path, where: str
) -> None:
    (tmp_path / "key").write_text("sk-ops\n")
    secret_file(tmp_path).write_text("0123456789abcdef" * 4)
    given = {
        "flag": ["--api-key", "sk-ops"],
        "file": ["--api-key-file", str(tmp_path / "key")],
        "variable": [],
        "secret": ["--cluster-secret-file", str(secret_file(tmp_path))],
    }[where]
    env = {"SLIPSTREAM_API_KEY": "sk-ops" if where == "variable" else "sk-of-a-tenant"}
    answer = invoke(port, "status", "--run-dir", str(tmp_path), *given, env=env)
    assert answer.exit_code == 0, answer.exception
    if where == "secret":
        assert TOKEN_HEADER in port.metadata and "authorization" not in port.metadata
    else:
        assert port.metadata["authorization"] == "Bearer sk-ops" and TOKEN_HEADER not in port.metadata


def test_a_key_file_without_one_key_is_refused(port: FleetPort, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("sk-one sk-two\n")
    answer = invoke(port, "status", "--api-key-file", str(tmp_path / "key"))
    assert isinstance(answer.exception, InvalidArgument)
    assert "sk-one" not in answer.exception.message


def test_without_the_server_package_the_commands_need_a_router(
    port: FleetPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installed_commands, "entry_points", lambda group: ())
    sdk = build_app()
    assert "takes work" in CliRunner().invoke(sdk, ["undrain", "decode-1", "--router", port.endpoint]).output
    for command in (["drain", "decode-1"], ["restart", "decode-1"], ["status"]):
        answer = CliRunner().invoke(sdk, command)
        assert isinstance(answer.exception, InvalidArgument), command
        assert answer.exception.field == "--router"


async def test_a_routed_call_has_the_time_that_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    times_s: list[float] = []

    class Stub:
        def CallProcess(self, request: fleet_pb2.CallProcessRequest, *, timeout: float) -> Any:
            times_s.append(timeout)

    async with RoutedDial("127.0.0.1:1", PLAIN_DIAL)("decode/decode-1") as channel:
        monkeypatch.setattr(channel, "_stub", Stub())
        call = worker_pb2_grpc.WorkerServiceStub(channel).GetStatus
        for timeout_s in (0.0, 3.0, None):
            with pytest.raises(TypeError):  # the answer is none
                await call(worker_pb2.GetStatusRequest(), timeout=timeout_s)
    assert times_s == [0.0, 3.0, 3600.0]


@pytest.mark.parametrize("name", ["kvstore-1", "kvstore/kvstore-1"])
def test_kv_finds_a_node_by_its_name_or_its_tier_and_name(port: FleetPort, name: str) -> None:
    port.processes.update({f"kvstore-{n}": process("kvstore", n) for n in range(2)})
    assert invoke(port, "kv", "stat", "--node", name).exit_code == 0
    assert {instance for instance, *_ in port.calls} == {"kvstore-1"}
    for other in ("decode/kvstore-1", "decode/decode-0", "kvstore/kvstore-2"):
        answer = invoke(port, "kv", "stat", "--node", other)
        assert isinstance(answer.exception, NotFound)
        assert answer.exception.message == f"no KV store node {other!r}; there are kvstore-0, kvstore-1"
