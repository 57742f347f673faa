"""The commands of `slipstream` with and without the server package."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
import typer
from typer.testing import CliRunner

from slipstream import __version__
from slipstream.cli import app as app_module
from slipstream.cli import installed_commands
from slipstream.cli.app import app, build_app
from slipstream.cli.port_error import port_error
from slipstream.cli.status import show_endpoints
from slipstream.errors import FailedPrecondition, InvalidArgument, Unavailable
from slipstream.rpc.dial import PLAIN_DIAL
from slipstream.v1 import worker_pb2, worker_pb2_grpc

SERVER_COMMANDS = ("up", "down", "kill", "route")


class Process(worker_pb2_grpc.WorkerServiceServicer):
    """A worker that answers GetStatus."""

    async def GetStatus(self, request: worker_pb2.GetStatusRequest, context: Any) -> Any:
        load = worker_pb2.LoadReport(requests_running=7)
        return worker_pb2.GetStatusResponse(instance="decode-9", load=load, rss_bytes=12_000_000)


@pytest.fixture
def sdk_only(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The command line without commands of other packages."""
    monkeypatch.setattr(installed_commands, "entry_points", lambda group: ())
    return build_app()


def test_the_version_option_prints_the_version() -> None:
    shown = CliRunner().invoke(app, ["--version"])
    assert (shown.exit_code, shown.output) == (0, f"slipstream {__version__}\n")


def test_the_package_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "slipstream", "--version"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert shown.stdout == f"slipstream {__version__}\n"


def test_the_server_package_adds_its_commands() -> None:
    listed = CliRunner().invoke(app, ["--help"]).output
    for name in ("chat", "status", "kv", *SERVER_COMMANDS):
        assert f"  {name} " in listed
    assert "--run-dir" in CliRunner().invoke(app, ["status", "--help"]).output


@pytest.mark.parametrize("name", SERVER_COMMANDS)
def test_a_server_command_without_the_package_names_it(sdk_only: Any, name: str) -> None:
    answer = CliRunner().invoke(sdk_only, [name, "--prefill", "2", "decode-0"])
    assert isinstance(answer.exception, FailedPrecondition)
    assert answer.exception.message.endswith("pip install slipstream-server")
    assert f"`slipstream {name}`" in answer.exception.message


PLUGIN = {
    "raises": "raise OSError('no licence\\nfound')",
    "ends": "raise SystemExit('not here')",
    "misspelt": "def other(): ...",
    "no_command": "command = 7",
    "no_code": "def (",
    "a_class": "command = int",
    "clicks": "import click\n@click.command()\ndef command(): ...",
    "unresolved": "def command(x: 'Missing'): ...",
    "a_group": "import typer\ncommand = typer.Typer()\n@command.command()\ndef part(x: 'Missing'): ...",
    "mute": "class Mute(BaseException):\n    def __str__(self): raise self\nraise Mute",
}
WORKS = "def command():\n    'Works.'\n    print('it works')"


def install(folder: Path, commands: dict[str, str], *, name: str = "acme-plug") -> None:
    """Write a package with these commands for a directory of PYTHONPATH. Without a name: without metadata."""
    for command, text in commands.items():
        (folder / f"plug_{command}.py").write_text(text)
    info = folder / f"{name or 'nameless'}-1.5.dist-info"
    info.mkdir()
    if name:
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
    points = "\n".join(f"{command} = plug_{command}:command" for command in commands)
    (info / "entry_points.txt").write_text(f"[slipstream.commands]\n{points}\n")


@pytest.fixture
def plugins(tmp_path: Path) -> str:
    """A directory for PYTHONPATH with a package whose commands do not load, and one that works."""
    install(tmp_path, {**PLUGIN, "works": WORKS, "chat": "import not_installed"})
    return str(tmp_path)


def run_with(plugins: str, *arguments: str) -> tuple[int, str, str]:
    path = os.pathsep.join(filter(None, (plugins, os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "slipstream", *arguments]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("raises", "OSError: no licence found"),
        ("ends", "SystemExit: not here"),
        ("misspelt", "AttributeError: module 'plug_misspelt' has no attribute 'command'"),
        ("no_command", "a int is no function and no typer.Typer"),
        ("a_class", "a type is no function and no typer.Typer"),
        ("clicks", "a Command is no function and no typer.Typer"),
        ("unresolved", "NameError: name 'Missing' is not defined"),
        ("a_group", "NameError: name 'Missing' is not defined"),
        ("mute", "Mute: (its text cannot be read)"),
        ("no_code", "SyntaxError: invalid syntax (plug_no_code.py, line 1)"),
        ("chat", "ModuleNotFoundError: No module named 'not_installed'"),
    ],
)
def test_a_command_that_does_not_load_names_its_package(
    plugins: str, name: str, why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(plugins)
    monkeypatch.setattr(app_module, "app", build_app())
    monkeypatch.setattr(sys, "argv", ["slipstream", name, "--flag", "x", "--help"])
    try:
        with pytest.raises(SystemExit) as ended:
            app_module.run()
    finally:
        sys.modules.pop(f"plug_{name}", None)
    assert (ended.value.code, *capsys.readouterr()) == (2, "", does_not_load(name, why))


def does_not_load(name: str, why: str) -> str:
    return f"slipstream {name} of acme-plug 1.5 does not load (plug_{name}:command): {why}\n"


def test_a_process_whose_command_does_not_load_ends_with_exit_code_2(plugins: str) -> None:
    mute = does_not_load("mute", "Mute: (its text cannot be read)")
    assert run_with(plugins, "mute", "--flag", "x", "--help") == (2, "", mute)


# Ctrl-C amid the imports, also below a shell whose background processes ignore it.
STOPPED = """import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.raise_signal(signal.SIGINT)
def command(): ..."""


def test_ctrl_c_amid_the_imports_ends_a_command_without_a_traceback(tmp_path: Path) -> None:
    install(tmp_path, {"stopped": STOPPED})
    assert run_with(str(tmp_path), "works") == (130, "", "")


def test_a_command_that_does_not_load_leaves_the_others_alone(plugins: str) -> None:
    assert run_with(plugins, "works") == (0, "it works\n", "")
    code, output, said = run_with(plugins, "--help")
    assert (code, said) == (0, "")
    assert all(f"  {name} " in output for name in (*PLUGIN, "works", "status"))


def test_a_broken_package_without_metadata_is_named_by_its_directory(tmp_path: Path) -> None:
    install(tmp_path, {"misspelt": "def other(): ..."}, name="")
    code, _, said = run_with(str(tmp_path), "misspelt")
    assert code == 2
    assert said.startswith(f"slipstream misspelt of a package without metadata in {tmp_path} does not load")


def test_entry_points_that_cannot_be_read_are_said_and_leave_the_others_alone(tmp_path: Path) -> None:
    install(tmp_path, {"works": WORKS})
    install(tmp_path, {}, name="bad")
    (tmp_path / "bad-1.5.dist-info" / "entry_points.txt").write_text(
        "[slipstream.commands]\nno equals sign\n"
    )
    code, output, said = run_with(str(tmp_path), "works")
    assert (code, output, said.count("\n")) == (0, "it works\n", 1)
    assert said.startswith("slipstream: the entry points of bad 1.5 cannot be read: ")


def test_a_command_that_replaces_none_is_said(tmp_path: Path) -> None:
    install(tmp_path, {"keys": WORKS, "works": WORKS})
    code, output, said = run_with(str(tmp_path), "keys", "list", "--help")
    assert code == 0 and "List the keys" in output
    assert said == "slipstream: the command keys of acme-plug 1.5 is left out: slipstream has one\n"


def test_what_a_library_logs_is_a_line_like_the_others(tmp_path: Path) -> None:
    warns = "log.warning('the watch of %s failed', '\\x1b[1m/')"
    text = f"import logging\nlog = logging.getLogger('a')\ndef command():\n    {warns}\n    log.info('more')"
    install(tmp_path, {"logs": text})
    assert run_with(str(tmp_path), "logs") == (0, "", "slipstream: the watch of \u241b[1m/ failed\n")


def test_sdk_commands_exist_without_the_server_package(sdk_only: Any) -> None:
    listed = CliRunner().invoke(sdk_only, ["--help"]).output
    assert all(f"  {name} " in listed for name in ("chat", "status", "kv", "top", "drain", "restart"))
    assert not any(f"  {name} " in listed for name in SERVER_COMMANDS)
    assert isinstance(CliRunner().invoke(sdk_only, ["status"]).exception, InvalidArgument)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["chat", "--bogus"], "slipstream chat: No such option: --bogus; see --help"),
        (["keys", "new", "--name"], "slipstream: Option '--name' requires an argument; see --help"),
        (["cha"], "slipstream: No such command 'cha'. Did you mean 'chat'? See --help"),
        (["nope"], "slipstream: No such command 'nope'; see --help"),
    ],
)
def test_refused_arguments_have_one_line(
    arguments: list[str], line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["slipstream", *arguments])
    with pytest.raises(SystemExit) as ended:
        app_module.run()
    assert (ended.value.code, capsys.readouterr().err) == (2, f"{line}\n")


def test_an_aborted_question_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def abort(**_: Any) -> int:
        raise typer.Abort

    monkeypatch.setattr(app_module, "app", abort)
    with pytest.raises(SystemExit) as ended:
        app_module.run()
    assert (ended.value.code, capsys.readouterr().err) == (1, "\nslipstream: aborted\n")


def _failed(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


@pytest.mark.parametrize(
    ("code", "details", "hint"),
    [
        (grpc.StatusCode.UNIMPLEMENTED, "", "ask the gRPC admin port"),
        (grpc.StatusCode.UNAUTHENTICATED, "a credential of class peer is needed", "ask through --router)"),
        (grpc.StatusCode.UNAUTHENTICATED, "a credential of class operator is needed", ", or --api-key of"),
        (grpc.StatusCode.UNAVAILABLE, "ipv4:127.0.0.1:7: Socket closed", "or it refuses the certificate"),
        (grpc.StatusCode.UNAVAILABLE, "Connection refused", "Connection refused"),
    ],
)
def test_a_failed_call_of_an_operator_has_a_hint(code: grpc.StatusCode, details: str, hint: str) -> None:
    assert hint in port_error(_failed(code, details)).message


def test_a_call_that_a_stopping_process_ends_may_be_made_again() -> None:
    assert isinstance(port_error(_failed(grpc.StatusCode.CANCELLED, "")), Unavailable)


async def test_status_of_a_port_without_status_names_the_admin_port(
    capsys: pytest.CaptureFixture[str],
) -> None:
    public = grpc.aio.server()
    ports = [f"127.0.0.1:{public.add_insecure_port('127.0.0.1:0')}"]
    await public.start()
    http = await asyncio.start_server(_answer_http, "127.0.0.1", 0)
    ports.append(f"127.0.0.1:{http.sockets[0].getsockname()[1]}")
    try:
        with pytest.raises(Unavailable, match="no answer from"):
            await show_endpoints(ports, as_json=True, dial=PLAIN_DIAL)
    finally:
        await public.stop(None)
        http.close()
    told = [row["error"] for row in json.loads(capsys.readouterr().out)["workers"]]
    assert ["ask the gRPC admin port (--admin" in words for words in told] == [True, True], told


async def _answer_http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """As the router's HTTP port answers gRPC."""
    writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
    writer.close()


@pytest.mark.parametrize("as_json", [False, True])
async def test_status_shows_the_given_endpoints(capsys: pytest.CaptureFixture[str], as_json: bool) -> None:
    server = grpc.aio.server()
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(Process(), server)  # type: ignore[abstract]
    endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        with pytest.raises(Unavailable, match=r"^no answer from 127\.0\.0\.1:1: .*refused"):
            await show_endpoints([endpoint, "127.0.0.1:1"], as_json=as_json, dial=PLAIN_DIAL)
    finally:
        await server.stop(None)
    shown = capsys.readouterr().out
    assert ("refused" in shown) is as_json, "the error says it"
    if as_json:
        answered, silent = json.loads(shown)["workers"]
        assert (answered["endpoint"], answered["status"]["instance"]) == (endpoint, "decode-9")
        assert (silent["endpoint"], silent["status"]) == ("127.0.0.1:1", None)
        assert "Connection refused" in silent["error"]
    else:
        *_, first, second = shown.splitlines()
        assert first.split()[:5] == ["decode-9", endpoint, "ready", "12", "7"]
        assert second.split()[:3] == ["-", "127.0.0.1:1", "no"]
