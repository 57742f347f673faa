"""Several router processes on one pair of ports."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import aiohttp

ROOT = Path(__file__).resolve().parents[2]


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def _started_s(admin_http: str) -> str:
    """Return when the process at this admin port started, by its own metrics."""
    async with aiohttp.ClientSession() as session, session.get(f"http://{admin_http}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    (line,) = [line for line in lines if line.startswith("process_start_time_seconds ")]
    return line


def _last_word(line: bytes) -> str:
    return line.decode().split()[-1]


async def _connects(address: str) -> bool:
    host, _, port = address.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.close()
    return True


async def test_two_processes_share_the_ports_and_a_killed_one_is_restarted(model_dir: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.router", "--instance", "router-0", "--model", str(model_dir)),
        *("--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--processes", "2", "--drain-s", "0.1"),
        cwd=ROOT,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stderr is not None
        async with asyncio.timeout(200):
            publics: set[str] = set()
            admins: list[str] = []
            while len(admins) < 2:
                line = await process.stderr.readline()
                assert line, "the router ended"
                if b"gRPC on " in line:
                    publics.add(line.decode().partition("gRPC on ")[2])
                if b"HTTP at " in line:
                    admins.append(_last_word(line))
            assert len(publics) == 1
            assert await _connects(publics.pop().split()[-1])
            # Each process has its own metrics, and so its own port for them.
            assert len(set(admins)) == 2
            assert all([await _started_s(admin) for admin in admins])
            victim = _children(process.pid)[0]
            os.kill(victim, signal.SIGKILL)
            while b"HTTP at " not in (line := await process.stderr.readline()):
                assert line, "the router ended"
            assert len(_children(process.pid)) == 2
            assert await _started_s(_last_word(line))
            children = _children(process.pid)
            process.send_signal(signal.SIGTERM)
            await process.communicate()
            assert process.returncode == 0
            assert not any(map(_alive, children))
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
