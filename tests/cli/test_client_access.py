"""How the commands of clients find the router of a local cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slipstream.cli.app import app
from slipstream.cli.client_access import ClientAccess
from slipstream.cluster_record import ClusterRecord
from slipstream.errors import InvalidArgument, NotFound
from slipstream.rpc.tls import TlsFiles
from supervisor.run_directory import RunDirLock, write_record

COMMANDS = (["chat"], ["usage"], ["jobs", "ls"])
NOWHERE = "127.0.0.1:1"
PEERS = {"ca": "ca.pem", "certificate": "peer.pem", "key": "peer.key"}


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Path]:
    """A run directory whose routers take certificates of another authority from clients."""
    record = ClusterRecord(
        1, None, "now", str(tmp_path), NOWHERE, NOWHERE, NOWHERE, "m", 1.0, tls=PEERS, client_ca="clients.pem"
    )
    write_record(tmp_path, record)
    lock = RunDirLock(tmp_path)
    yield tmp_path
    lock.close()


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_ca_of_clients_asks_for_such_a_certificate(running: Path, command: list[str]) -> None:
    answer = CliRunner().invoke(app, [*command, "--run-dir", str(running)])
    assert isinstance(answer.exception, InvalidArgument)
    assert "certificates of clients.pem only: give one with --tls-ca" in answer.exception.message


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_missing_cluster_names_the_flag_that_replaces_it(tmp_path: Path, command: list[str]) -> None:
    answer = CliRunner().invoke(app, [*command, "--run-dir", str(tmp_path)])
    assert isinstance(answer.exception, NotFound)
    assert "--endpoint HOST:PORT" in answer.exception.message


def test_a_named_router_or_certificate_comes_before_those_of_the_run_directory(running: Path) -> None:
    own = TlsFiles(Path("ca.pem"), Path("own.pem"), Path("own.key"))
    assert ClientAccess(running, "router:7000").router() == ("router:7000", None)
    assert ClientAccess(running, tls=own).router() == (NOWHERE, own)
