"""Runs `slipstream` commands, and files that import it, in forks of one process that has imported it already.

A fresh Python takes most of a second of processor time before its command begins. Each command has its own
process all the same: with its own arguments, environment, standard streams and exit code.
"""

from __future__ import annotations

import asyncio
import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

_TIMEOUT_S = 100.0


class Finished(NamedTuple):
    """What a command left."""

    exit_code: int
    output: str
    errors: str


class CommandForks:
    """The process that forks, from its start until `close`."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    async def run(
        self, *arguments: str, environment: Mapping[str, str] | None = None, typed: str = ""
    ) -> Finished:
        """Run one command to its end; `environment` is added to that of the tests."""
        return await self._run("", arguments, environment, typed)

    async def run_file(self, file: Path, *arguments: str) -> Finished:
        """Run `python FILE ARGUMENT...` to its end."""
        return await self._run(str(file), arguments, None, "")

    async def _run(
        self, file: str, arguments: Sequence[str], environment: Mapping[str, str] | None, typed: str
    ) -> Finished:
        with tempfile.TemporaryDirectory() as folder:
            streams = [Path(folder, name) for name in ("in", "out", "err")]
            streams[0].write_text(typed)
            order = {
                "file": file,
                "arguments": arguments,
                "environment": {**os.environ, **(environment or {})},
                "streams": [str(path) for path in streams],
            }
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    exit_code = await asyncio.to_thread(self._order, json.dumps(order))
            except TimeoutError:
                self._process.kill()
                raise
            return Finished(exit_code, streams[1].read_text(), streams[2].read_text())

    def close(self) -> None:
        """End the process."""
        with self._process:
            assert self._process.stdin is not None
            self._process.stdin.close()

    def _order(self, line: str) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(line, file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())


def _serve() -> None:
    """Fork for each line of standard input, and write the fork's exit code."""
    import slipstream.cli.chat.session
    import slipstream.cli.kv.change
    import slipstream.cli.kv.show
    import slipstream.cli.status  # noqa: F401
    from slipstream.cli.app import run

    tasks = Path("/proc/self/task")
    assert not tasks.exists() or len(list(tasks.iterdir())) == 1, "a fork has no threads of its parent"
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            os._exit(_as_command(run, json.loads(line)))
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def _as_command(run: Any, order: dict[str, Any]) -> int:
    """Be the command of the order. Returns its exit code."""
    for number, (path, flags) in enumerate(
        zip(order["streams"], (os.O_RDONLY, *[os.O_WRONLY | os.O_CREAT] * 2), strict=True)
    ):
        opened = os.open(path, flags, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  # the old one may hold lines of later orders
    os.environ.clear()
    os.environ.update(order["environment"])
    file = order["file"]
    sys.argv = [file or "slipstream", *order["arguments"]]
    exit_code: object = 0
    try:
        if file:
            runpy.run_path(file, run_name="__main__")
        else:
            run()
    except SystemExit as ended:
        exit_code = ended.code
        if isinstance(exit_code, str):
            print(exit_code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        exit_code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return exit_code if isinstance(exit_code, int) else int(exit_code is not None)


if __name__ == "__main__":
    _serve()
