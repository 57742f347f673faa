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


async def _instances(http: str) -> set[str]:
    """Return the names of the answering processes, over several connections."""
    seen: set[str] = set()
    for _ in range(40):
        try:
            async with aiohttp.ClientSession() as session, session.get(f"http://{http}/metrics") as answer:
                text = await answer.text()
        except aiohttp.ClientError:
            continue
        seen |= {part.split('"')[0] for part in text.split('instance="')[1:]}
        if len(seen) == 2:
            break
    return seen


async def test_two_processes_share_the_ports_and_a_killed_one_is_restarted(model_dir: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.router", "--instance", "router-0", "--model", str(model_dir)),
        *("--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--processes", "2", "--drain-s", "0.1"),
        cwd=ROOT,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stderr is not None
        https: list[str] = []
        async with asyncio.timeout(200):
            while len(https) < 2:
                line = await process.stderr.readline()
                assert line, "the router ended"
                if b"HTTP at " in line:
                    https.append(line.decode().rsplit(" ", 1)[1].strip())
            assert https[0] == https[1]
            assert await _instances(https[0]) == {"router-0", "router-0.1"}
            victim = _children(process.pid)[0]
            os.kill(victim, signal.SIGKILL)
            while b"HTTP at " not in (line := await process.stderr.readline()):
                assert line, "the router ended"
            assert len(_children(process.pid)) == 2
            assert await _instances(https[0]) == {"router-0", "router-0.1"}
            children = _children(process.pid)
            process.send_signal(signal.SIGTERM)
            await process.communicate()
            assert process.returncode == 0
            assert not any(map(_alive, children))
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
