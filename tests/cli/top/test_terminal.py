"""`slipstream top` as a process on a terminal, and without one."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from slipstream.cli.app import app
from slipstream.v1 import worker_pb2
from tests.cli.fleet.fleet_port import FleetPort, process

WAIT_S = 60.0
_CONTROLS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
ENTER, LEAVE = "\x1b[?1049h", "\x1b[?1049l"


def port_of(n_decode: int) -> FleetPort:
    workers = [process("decode", n, requests_running=n + 1) for n in range(n_decode)]
    return FleetPort(process("router", requests_running=5, requests_waiting=2), *workers)


class Terminal:
    """The command on a pseudo-terminal."""

    def __init__(self, endpoint: str, *, columns: int = 80, rows: int = 24) -> None:
        self.master, self.slave = pty.openpty()
        self.resize(columns, rows)
        self.before = termios.tcgetattr(self.slave)
        command = ["slipstream.cli", "top", "--router", endpoint, "--interval-s", "0.2"]
        environment = {**os.environ, "TERM": "xterm-256color"}
        for name in ("COLUMNS", "LINES", "NO_COLOR"):
            environment.pop(name, None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", *command],
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
            env=environment,
            start_new_session=True,
        )
        self.shown = ""

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def press(self, keys: str) -> None:
        self.shown = ""
        os.write(self.master, keys.encode())

    def until(self, *wanted: str) -> str:
        """What was drawn since the last key, once it has all of these."""
        deadline = time.monotonic() + WAIT_S
        while not all(text in _CONTROLS.sub("", self.shown) for text in wanted):
            left_s = deadline - time.monotonic()
            assert left_s > 0, f"not drawn: {wanted}; {self.shown[-2000:]!r}"
            if select.select([self.master], [], [], left_s)[0]:
                self.shown += os.read(self.master, 65536).decode(errors="replace")
        return _CONTROLS.sub("", self.shown)

    def end(self) -> tuple[int, str]:
        """The exit code, and all that was drawn last."""
        code = self.process.wait(WAIT_S)
        while select.select([self.master], [], [], 0.1)[0]:
            self.shown += os.read(self.master, 65536).decode(errors="replace")
        return code, self.shown

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(WAIT_S)
        os.close(self.master)
        os.close(self.slave)


@pytest.fixture
def opened() -> Iterator[list[Terminal]]:
    terminals: list[Terminal] = []
    yield terminals
    for terminal in terminals:
        terminal.close()


def test_keys_resizes_and_a_restarted_router_on_a_terminal(opened: list[Terminal]) -> None:
    first = port_of(40)
    with first.serving() as port:
        endpoint = port.endpoint
        terminal = Terminal(endpoint)
        opened.append(terminal)
        terminal.until("requests 5 running, 2 queued", "decode-5 ", "by tier", "of 41")
        terminal.press("s")
        terminal.until("by load", "decode-39 ")
        terminal.press("p")
        terminal.until("paused")
        terminal.press("p")
        terminal.resize(200, 60)
        terminal.press("G")  # no key: what is drawn from now on has the new size
        os.killpg(terminal.process.pid, signal.SIGWINCH)
        terminal.until("decode-0 ", "decode-39 ")
        port.processes["decode-39"].load.requests_running = 777
        terminal.until("777")
    terminal.press("G")
    terminal.until("no answer, asks again")
    with port_of(3).serving(endpoint):
        terminal.press("G")
        terminal.until("requests 5 running", "decode-2 ")
        terminal.press("q")
        code, drawn = terminal.end()
    assert code == 0
    assert drawn.endswith("\x1b[?25h") or LEAVE in drawn
    assert termios.tcgetattr(terminal.slave) == terminal.before


def test_d_drains_the_chosen_worker_after_a_yes_and_u_takes_it_back(opened: list[Terminal]) -> None:
    with port_of(3).serving() as port:
        terminal = Terminal(port.endpoint)
        opened.append(terminal)
        terminal.until("decode-2 ")
        terminal.press("jjj")  # router-0, decode-0, decode-1
        terminal.press("d")
        terminal.until("Drain decode-1, which runs 2? y yes")
        terminal.press("n")
        terminal.until("d drain")
        terminal.press("d")
        terminal.until("Drain decode-1")
        assert port.calls == []
        terminal.press("y")
        terminal.until("decode-1 is drained", "draining")
        terminal.press("u")
        terminal.until("Undrain decode-1?")
        terminal.press("y")
        terminal.until("decode-1 takes work")
        port.held = worker_pb2.Ledger(sequences=2)
        terminal.press("dy")
        terminal.until("holds 2 sequences")
        terminal.press("q")
        code, _ = terminal.end()
    assert code == 0
    assert [call[:2] for call in port.calls] == [
        ("decode-1", "Drain"),
        ("decode-1", "Undrain"),
        ("decode-1", "Drain"),
    ]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_cleanly(how: signal.Signals, opened: list[Terminal]) -> None:
    with port_of(1).serving() as port:
        terminal = Terminal(port.endpoint)
        opened.append(terminal)
        terminal.until("decode-0 ")
        assert ENTER in terminal.shown
        terminal.process.send_signal(how)
        code, drawn = terminal.end()
    assert (code, LEAVE in drawn, "Traceback" in drawn) == (0, True, False)
    assert termios.tcgetattr(terminal.slave) == terminal.before


def test_without_a_terminal_it_prints_once() -> None:
    with port_of(100).serving() as port:
        shown = CliRunner().invoke(app, ["top", "--router", port.endpoint, "--sort", "load"]).output
        said = json.loads(CliRunner().invoke(app, ["top", "--router", port.endpoint, "--json"]).output)
    lines = shown.splitlines()
    assert len([line for line in lines if line.startswith("decode-")]) == 100
    assert "\x1b" not in shown and "q quit" not in shown
    assert lines[-1].startswith("decode-0 ")
    assert [tier["tier"] for tier in said["tiers"]] == ["router", "prefill", "decode", "kvstore"]
    assert said["processes"][0]["running"] == 5
    refused = CliRunner().invoke(app, ["top", "--router", "127.0.0.1:1", "--sort", "size"])
    assert "--sort: must be one of tier, load" in str(refused.exception)
