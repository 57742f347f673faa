"""How the commands of clients find the router of a local cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner

from slipstream.cli.app import app
from slipstream.cli.client_access import ClientAccess, client_endpoints
from slipstream.errors import InvalidArgument, NotFound, Unauthenticated, Unavailable
from slipstream.rpc.tls import TlsFiles
from slipstream.v1 import fleet_pb2
from tests.cli.fleet.fleet_port import FleetPort, process
from tests.support.clusters.recorded import recorded, recorded_cluster

SILENT = fleet_pb2.PROCESS_STATE_SILENT
COMMANDS = (["chat"], ["usage"], ["jobs", "ls"])
NOWHERE = "127.0.0.1:1"
PEERS = {"ca": "ca.pem", "certificate": "peer.pem", "key": "peer.key"}


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Path]:
    """A run directory whose routers take certificates of another authority from clients."""
    with recorded_cluster(tmp_path, recorded("router-0"), tls=PEERS, client_ca="clients.pem"):
        yield tmp_path


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_ca_of_clients_asks_for_such_a_certificate(running: Path, command: list[str]) -> None:
    answer = CliRunner().invoke(app, [*command, "--run-dir", str(running)])
    assert isinstance(answer.exception, InvalidArgument)
    assert "certificates of clients.pem only: give one with --tls-ca" in answer.exception.message


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_missing_cluster_names_the_flag_that_replaces_it(tmp_path: Path, command: list[str]) -> None:
    answer = CliRunner().invoke(app, [*command, "--run-dir", str(tmp_path)])
    assert isinstance(answer.exception, NotFound)
    assert "--router or --endpoint HOST:PORT" in answer.exception.message


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_the_admin_port_that_a_command_names_is_asked_for_the_port_of_clients(
    tmp_path: Path, command: list[str]
) -> None:
    """SLIPSTREAM_ROUTER means the same cluster to every command."""
    with FleetPort(process("prefill")).serving() as port:
        for flags, env in (["--router", port.endpoint], {}), ([], {"SLIPSTREAM_ROUTER": port.endpoint}):
            given = [*command, "--run-dir", str(tmp_path), *flags]
            answer = CliRunner().invoke(app, given, env={**env, "SLIPSTREAM_API_KEY": "sk-slip-ops"})
            assert isinstance(answer.exception, NotFound), answer.exception
            assert f"{port.endpoint} names no router that is ready" in answer.exception.message
            assert port.metadata["authorization"] == "Bearer sk-slip-ops"


class ClosedFleetPort(FleetPort):
    """Refuses calls without a credential, as a router's admin port does."""

    async def GetFleet(self, request: Any, context: Any) -> fleet_pb2.GetFleetResponse:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "a credential of class operator is needed")
        raise AssertionError


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_refusal_names_what_the_command_takes(tmp_path: Path, command: list[str]) -> None:
    with ClosedFleetPort().serving() as port:
        given = [*command, "--run-dir", str(tmp_path), "--router", port.endpoint]
        error = CliRunner().invoke(app, given).exception
    assert isinstance(error, Unauthenticated)
    assert error.message.endswith("(--api-key of an operator, or --endpoint of a router's port for clients)")


def test_routers_that_are_ready_are_called_at_their_ports_for_clients(tmp_path: Path) -> None:
    routers = [process("router", number) for number in range(4)]
    for router, at in zip(routers, ("a:7000", "a:7000", "b:7000", "c:7000"), strict=True):
        router.client_endpoint = at
    routers[3].state = SILENT
    fleet = fleet_pb2.GetFleetResponse(router="router-0", processes=routers)
    assert client_endpoints(fleet, is_verified=True) == ["a:7000", "a:7000", "b:7000"]
    with FleetPort(process("prefill"), *routers).serving() as port:
        assert ClientAccess(tmp_path, routers=(NOWHERE, port.endpoint)).router() == ("a:7000", None)
        named = ClientAccess(tmp_path, "d:7000", routers=(port.endpoint,))
        assert named.router() == ("d:7000", None)
    with pytest.raises(Unavailable):
        ClientAccess(tmp_path, routers=(NOWHERE,)).router()


def test_a_false_record_of_a_router_gets_no_api_key() -> None:
    """A writer into etcd adds a router that answers; without certificates nothing says what it is."""
    true, false = process("router", 0), process("router", 1)
    true.client_endpoint, false.client_endpoint = "a:7000", "evil.test:7000"
    fleet = fleet_pb2.GetFleetResponse(router="router-0", processes=[true, false])
    assert client_endpoints(fleet, is_verified=False) == ["a:7000"]
    fleet.processes[0].state = SILENT
    assert client_endpoints(fleet, is_verified=False) == []


def test_a_named_router_or_certificate_comes_before_those_of_the_run_directory(running: Path) -> None:
    own = TlsFiles(Path("ca.pem"), Path("own.pem"), Path("own.key"))
    assert ClientAccess(running, "router:7000").router() == ("router:7000", None)
    assert ClientAccess(running, tls=own).router() == (NOWHERE, own)


def test_a_ready_router_is_called_in_the_place_of_one_that_is_down(tmp_path: Path) -> None:
    down = recorded("router-0", "drained", pid=None)
    with recorded_cluster(tmp_path, down, recorded("router-1", endpoint="127.0.0.1:2")):
        assert ClientAccess(tmp_path).router() == ("127.0.0.1:2", None)


@pytest.mark.parametrize("command", [*COMMANDS, ["top"], ["autoscale"]], ids=" ".join)
def test_without_a_ready_router_each_command_says_what_they_do(tmp_path: Path, command: list[str]) -> None:
    routers = recorded("router-0", "drained", pid=None), recorded("router-1", "starting")
    with recorded_cluster(tmp_path, *routers):
        error = CliRunner().invoke(app, [*command, "--run-dir", str(tmp_path)]).exception
    assert isinstance(error, NotFound)
    assert error.message == (
        f"no router serves in {tmp_path}: router-0 is drained (`slipstream undrain router-0` starts it), "
        "router-1 is starting (see router-1.log)"
    )


def test_an_endpoint_is_used_although_the_variable_of_routers_is_wrong(tmp_path: Path) -> None:
    given = ["usage", "--endpoint", NOWHERE, "--run-dir", str(tmp_path)]
    answer = CliRunner().invoke(
        app, given, env={"SLIPSTREAM_ROUTER": "nohost", "SLIPSTREAM_API_KEY": "sk-slip-a"}
    )
    assert not isinstance(answer.exception, InvalidArgument)
    assert NOWHERE in str(answer.exception)
