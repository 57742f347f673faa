"""`slipstream kv`, `status` and `chat` with servers that require mTLS."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from libs.common.transport.registered_memory import PageAlignedMemory
from libs.common.transport.socket import SocketTransport
from slipstream.cluster_record import ClusterRecord, ProcessRecord
from slipstream.rpc.tls import TlsFiles
from supervisor.run_directory import RunDirLock, write_record
from tests.cli.chat.test_session import Router
from tests.kvstore.node import BLOCK_BYTES, ROOT, Client, KvstoreProcess, key
from tests.support.processes.command_forks import CommandForks
from tests.support.stubs.blocking_router import serving
from tests.support.stubs.partial_servicer import partial_servicer

PEMS = ROOT / "tests" / "support" / "tls"
FILES = TlsFiles(PEMS / "ca.pem", PEMS / "peer.pem", PEMS / "peer.key")
# An operator's certificate, of the CA that the node trusts.
OPERATOR = TlsFiles(PEMS / "ca.pem", PEMS / "client.pem", PEMS / "client.key")


def flags(files: TlsFiles) -> tuple[str, ...]:
    """The files as flags."""
    return (
        *("--tls-ca", str(files.ca)),
        *("--tls-certificate", str(files.certificate), "--tls-key", str(files.key)),
    )


FLAGS = flags(OPERATOR)
SERVER = replace(FILES, ca=PEMS / "client-ca.pem")  # trusts the operator's certificate
ENVIRONMENT = {
    "SLIPSTREAM_TLS_CA": str(OPERATOR.ca),
    "SLIPSTREAM_TLS_CERTIFICATE": str(OPERATOR.certificate),
    "SLIPSTREAM_TLS_KEY": str(OPERATOR.key),
}


async def slipstream(
    commands: CommandForks,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    exit_code: int | None = 0,
    typed: str = "",
) -> tuple[str, str]:
    """Run the command and return its standard output and standard error."""
    done = await commands.run(*arguments, environment=environment, typed=typed)
    assert exit_code in (None, done.exit_code), done.errors
    return done.output, done.errors


async def kv(
    commands: CommandForks, node: KvstoreProcess, verb: str, *arguments: str, tries: int = 5, **how: Any
) -> Any:
    """Return the verb's JSON for the node; retry while the node does not answer in time."""
    if verb in ("ls", "stat"):
        how.setdefault("exit_code", None)
    for _ in range(tries):
        output, _ = await slipstream(
            commands, "kv", verb, *arguments, "--node", node.endpoint, "--json", **how
        )
        (answer,) = json.loads(output)
        if not answer["error"]:
            break
    return answer


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[KvstoreProcess]:
    """A node with three blocks."""
    process = KvstoreProcess(tmp_path, "socket", disk_bytes=0, arguments=flags(SERVER))
    process.start()
    memory = PageAlignedMemory(8 * BLOCK_BYTES)
    transport = SocketTransport()
    transport.register(memory.buffer)
    client = Client(process.endpoint, transport, memory, tls=OPERATOR)
    assert await client.put([1, 2, 3]) == 3
    await client.close()
    yield process
    await transport.close()
    assert process.terminate() == 0


async def test_every_kv_verb_over_mtls(commands: CommandForks, node: KvstoreProcess) -> None:
    listed = await kv(commands, node, "ls", *FLAGS)
    assert {block["hash"] for block in listed["blocks"]} == {key(n).hex() for n in (1, 2, 3)}
    stats = await kv(commands, node, "stat", environment=ENVIRONMENT)
    assert stats["tiers"]["dram"]["blocks"] == 3
    verified = await kv(commands, node, "verify", *FLAGS)
    assert (verified["verified"], verified["corrupt"]) == (3, [])
    dropped = await kv(commands, node, "drop", key(2).hex(), environment=ENVIRONMENT)
    assert dropped["blocks"] == 1
    assert (await kv(commands, node, "ls", *FLAGS))["held"] == 2


async def test_a_client_without_a_certificate_gets_no_data(
    commands: CommandForks, node: KvstoreProcess
) -> None:
    stats = await kv(commands, node, "stat", tries=1)
    assert stats["error"]
    assert "tiers" not in stats
    await kv(commands, node, "verify", exit_code=1, tries=1)


async def test_status_over_mtls(commands: CommandForks, node: KvstoreProcess, tmp_path: Path) -> None:
    """The status command reads the record of a supervisor whose only service is the node."""
    pid = node.process.pid
    process = ProcessRecord("kv-0", "kvstore", "ready", pid, None, node.endpoint, None, 0, "")
    nowhere = "127.0.0.1:1"
    record = ClusterRecord(pid, None, "now", str(tmp_path), nowhere, nowhere, nowhere, "m", 1.0, (process,))
    write_record(tmp_path, record)
    lock = RunDirLock(tmp_path)
    arguments = ("status", "--run-dir", str(tmp_path), "--json")
    for _ in range(10):  # a worker that does not answer in time is shown without its status
        (worker,) = json.loads((await slipstream(commands, *arguments, *FLAGS, exit_code=None))[0])["workers"]
        if worker["status"]:
            break
    assert worker["status"]["instance"] == "kv-0"
    assert worker["status"]["ledger"]
    output, errors = await slipstream(commands, *arguments, exit_code=1)
    (silent,) = json.loads(output)["workers"]
    assert silent["status"] is None
    assert silent["error"]
    assert "HTTP http://127.0.0.1:1/v1" in (await slipstream(commands, *arguments[:-1], exit_code=1))[0]
    write_record(tmp_path, replace(record, tls={"ca": "ca.pem"}))
    assert (
        "HTTP https://127.0.0.1:1/v1"
        in (await slipstream(commands, *arguments[:-1], *FLAGS, exit_code=None))[0]
    )
    assert errors == "slipstream: no answer from kv-0\n"
    lock.close()


@pytest.mark.parametrize("by", ["flags", "environment"])
async def test_chat_over_mtls(commands: CommandForks, by: str) -> None:
    given = FLAGS if by == "flags" else ()
    with serving(partial_servicer(Router), SERVER.server_credentials()) as endpoint:
        shown, errors = await slipstream(
            commands,
            *("chat", "--endpoint", endpoint, *given),
            environment=ENVIRONMENT if by == "environment" else None,
            typed="hello\n",
        )
    assert "You said hello." in shown, errors


async def test_chat_without_a_certificate_names_the_cause(
    commands: CommandForks,
) -> None:
    with serving(partial_servicer(Router), SERVER.server_credentials()) as endpoint:
        _, errors = await slipstream(commands, "chat", "--endpoint", endpoint, typed="hello\n", exit_code=1)
    assert "the port may speak TLS: give --tls-ca" in errors


async def test_usage_without_a_certificate_names_the_cause(
    commands: CommandForks,
) -> None:
    with serving(partial_servicer(Router), SERVER.server_credentials()) as endpoint:
        _, errors = await slipstream(commands, "usage", "--endpoint", endpoint, exit_code=1)
    assert errors.count("the port may speak TLS: give --tls-ca") == 1


@pytest.mark.parametrize("port", ["--endpoint", "--router"])
async def test_a_refused_certificate_names_the_ports_of_two_authorities(
    commands: CommandForks, port: str
) -> None:
    with serving(partial_servicer(Router), FILES.server_credentials()) as endpoint:
        _, errors = await slipstream(commands, "usage", port, endpoint, *flags(OPERATOR), exit_code=1)
    assert "or it refuses the certificate that is given: with --tls-client-ca" in errors
    assert "port for clients (--endpoint), and of another at its admin port (--router)" in errors


@pytest.mark.parametrize("verb", [("kv", "stat", "--node", "127.0.0.1:1"), ("status",), ("chat",)])
async def test_invalid_tls_files_are_named(
    commands: CommandForks, verb: tuple[str, ...], tmp_path: Path
) -> None:
    _, errors = await slipstream(commands, *verb, "--tls-ca", str(FILES.ca), exit_code=1)
    assert "go together" in errors
    _, errors = await slipstream(
        commands, *verb, *FLAGS[:4], "--tls-key", str(tmp_path / "none"), exit_code=1
    )
    assert "--tls-key" in errors
    _, errors = await slipstream(commands, *verb, *FLAGS[:4], "--tls-key", str(FILES.key), exit_code=1)
    assert "--tls-certificate, --tls-key: " in errors and "is not the key of" in errors
    assert "Traceback" not in errors
