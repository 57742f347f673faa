"""The command line against a cluster of fake services, run as separate processes."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from libs.common.cluster.placement_record import Placement, SessionId, encode_placement
from libs.common.etcd.client import EtcdClient
from slipstream.cli.app import app
from slipstream.cluster_record import is_running, read_record
from slipstream.errors import InvalidArgument, NotFound
from supervisor.commands import up as up_module
from supervisor.configuration.cluster_options import DEFAULT_DRAFT_MODEL, DEFAULT_MODEL
from supervisor.configuration.plan import ClusterConfig
from tests.support.processes.command_forks import CommandForks
from tests.support.processes.process_checks import alive, eventually, mentioning


class Commands:
    """Runs `slipstream`, each time in its own process."""

    def __init__(self, forks: CommandForks) -> None:
        self._forks = forks

    async def __call__(self, *arguments: str, exit_code: int | None = 0) -> str:
        """What the command printed. `exit_code` None: any."""
        done = await self._forks.run(*arguments)
        assert exit_code in (None, done.exit_code), done
        return done.output + done.errors


@pytest.fixture
def slipstream() -> Iterator[Commands]:
    forks = CommandForks()
    yield Commands(forks)
    forks.close()


def ready(run_dir: Path) -> bool:
    try:
        record = read_record(run_dir)
    except NotFound:
        return False
    return record.ready_s is not None and {p.state for p in record.processes} == {"ready"}


@pytest.fixture
async def foreground(tmp_path: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """`up` as a process, with its run directory in tmp_path / "run"."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.support.clusters.fake_cluster", str(tmp_path / "run"), str(model)),
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        await eventually(lambda: process.returncode is not None or ready(tmp_path / "run"))
        assert process.returncode is None, "it ended before it was ready"
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_status_kill_and_down(
    foreground: asyncio.subprocess.Process, slipstream: Commands, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    record = read_record(run_dir)
    client = EtcdClient([record.etcd], timeout_s=60)
    placement = Placement("kvstore-0", "prefill-0", "decode-0", 12, b"\xab" * 16)
    await client.put(SessionId("acme", "chat 1").key, encode_placement(placement))
    await client.close()

    # A process that does not answer soon is shown without its status, and fails the command.
    asked = ("status", "--run-dir", str(run_dir))
    for _ in range(10):
        shown = await slipstream(*asked, "--json", exit_code=None)
        status: dict[str, Any] = json.JSONDecoder().raw_decode(shown)[0]
        if status["sessions"] and all(w["status"] for w in status["workers"] if w["instance"] != "etcd"):
            break
    assert status["cluster"]["router_grpc"] == record.router_grpc
    workers = {worker["instance"]: worker for worker in status["workers"]}
    assert set(workers) == {"etcd", "prefill-0", "decode-0", "router-0"}
    assert workers["decode-0"]["status"]["role"] == "decode"
    assert workers["decode-0"]["status"]["load"]["requests_running"] == 2
    assert workers["decode-0"]["rss_bytes"] > 1e6
    session = status["sessions"][0]
    assert (session["session"], session["decode"], session["block_count"]) == ("chat 1", "decode-0", 12)
    assert session["epoch"] > 0

    for _ in range(10):
        if "chat 1" in (table := await slipstream(*asked, exit_code=None)):
            break
    assert record.router_grpc in table
    assert "decode-0" in table
    assert "chat 1" in table

    killed = await slipstream("kill", "decode-0", "--run-dir", str(run_dir))
    old_pid = workers["decode-0"]["pid"]
    assert killed.strip() == f"killed decode-0 (pid {old_pid})"
    await eventually(lambda: ready(run_dir) and read_record(run_dir).find("decode-0").pid != old_pid)
    assert "there are etcd, prefill-0" in await slipstream(
        "kill", "nobody", "--run-dir", str(run_dir), exit_code=1
    )

    await slipstream("down", "--run-dir", str(run_dir))
    assert foreground.stderr is not None
    said = (await foreground.stderr.read()).decode()
    assert await foreground.wait() == 0
    assert not mentioning(str(run_dir))
    assert "starting etcd, 1 prefill, 1 decode, 1 router" in said
    assert f"console http://{record.find('router-0').admin_http}/console/\n" in said
    assert f"gRPC {record.router_grpc}, HTTP http://{record.router_http}/v1" in said
    assert said.endswith("slipstream: stopped\n")
    for verb in ("status", "down"):
        assert "no cluster runs" in await slipstream(verb, "--run-dir", str(run_dir), exit_code=1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_stops_everything(
    foreground: asyncio.subprocess.Process, tmp_path: Path, number: signal.Signals
) -> None:
    pids = [process.pid for process in read_record(tmp_path / "run").processes]
    foreground.send_signal(number)
    async with asyncio.timeout(100):
        assert await foreground.wait() == 0
    assert not any(pid is not None and alive(pid) for pid in pids)
    assert not is_running(tmp_path / "run")


def test_flags_of_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[ClusterConfig] = []

    async def remember(config: ClusterConfig) -> int:
        seen.append(config)
        return 0

    monkeypatch.setattr(up_module, "run_cluster", remember)
    runner = CliRunner()
    assert runner.invoke(app, ["up"]).exit_code == 0
    flags = "--prefill 3 --decode 4 --kvstore 0 --drafter 2 --router 2 --http 127.0.0.1:8000 --etcd e:2379"
    arguments = ["up", *flags.split(), "--model", str(tmp_path), "--transport", "socket"]
    assert runner.invoke(app, arguments).exit_code == 0
    for wrong in ("--prefill=-1", "--ready-timeout-s=-1", "--grace-s=-1", "--router=0"):
        assert runner.invoke(app, ["up", wrong]).exit_code == 2
    alone = runner.invoke(app, ["up", "--decode", "0"])  # what else would do its work
    assert isinstance(alone.exception, InvalidArgument)
    assert alone.exception.field == "--decode"
    assert runner.invoke(app, ["up", "--decode", "0", "--etcd", "e:2379"]).exit_code == 0
    assert runner.invoke(app, ["up", "--prefill", "0"]).exit_code == 0
    default, custom, *_ = seen
    assert default == ClusterConfig(http="127.0.0.1:8000", grpc="127.0.0.1:7000")
    assert (default.model, default.draft_model) == (DEFAULT_MODEL, DEFAULT_DRAFT_MODEL)
    assert list(custom.counts().values()) == [0, 3, 4, 2, 2]
    assert (custom.model, custom.draft_model, custom.http) == (tmp_path, None, "127.0.0.1:8000")
    assert (custom.etcd, custom.transport) == ("e:2379", "socket")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("status --endpoint nowhere", "--endpoint: must be host:port, not 'nowhere'"),
        ("status --endpoint 127.0.0.1:99999", "--endpoint: must be host:port, not '127.0.0.1:99999'"),
        ("chat --endpoint a:1,nowhere", "--endpoint: must be host:port, not 'nowhere'"),
        ("chat --tools /none", "--tools: /none cannot be read: No such file or directory"),
        ("chat --tls-ca /none", "--tls-ca, --tls-certificate, --tls-key: go together"),
    ],
)
def test_a_value_that_cannot_be_used_names_its_flag(arguments: str, message: str) -> None:
    failed = CliRunner().invoke(app, arguments.split()).exception
    assert isinstance(failed, InvalidArgument) and failed.message == message


def test_a_router_from_the_environment_is_named_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_ROUTER", "nohost")
    failed = CliRunner().invoke(app, ["status"]).exception
    assert isinstance(failed, InvalidArgument)
    assert failed.message == "SLIPSTREAM_ROUTER: must be host:port, not 'nohost'"
    named = CliRunner().invoke(app, ["status", "--router", "other"]).exception
    assert isinstance(named, InvalidArgument)
    assert named.message == "--router: must be host:port, not 'other'"


def test_an_unknown_option_is_named() -> None:
    for arguments in (["--config", "none"], ["up", "--confg", "none"], ["status", "--confg", "none"]):
        refused = CliRunner().invoke(app, arguments)
        assert refused.exit_code == 2
        assert f"No such option: {arguments[-2]}" in refused.output


async def test_help_imports_neither_grpc_nor_torch() -> None:
    probe = (
        "import sys; sys.argv = ['slipstream', '--help']\n"
        "from slipstream.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "loaded = {'grpc', 'torch', 'aiohttp', 'rich.table'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", probe)
    assert await process.wait() == 0
