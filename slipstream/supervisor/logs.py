"""Output of the cluster's processes: to files, with problems passed on to the terminal.

.run/logs/cluster.log      everything, each line prefixed with the instance
.run/logs/decode-0.log     one file a process; the previous run's is kept as decode-0.log.1
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable, Iterable
from io import BufferedWriter
from pathlib import Path

_CHUNK_BYTES = 64 << 10
_LONGEST_LINE_BYTES = 64 << 10
_TAIL_LINES = 15
# The level field of libs.common.telemetry's format, and of etcd's JSON lines.
_PROBLEM = re.compile(rb'^\S+ \S+ (ERROR|CRITICAL) |"level":"(error|fatal|panic)"')


class LogBook:
    """The log files of one cluster."""

    def __init__(self, folder: Path, *, on_problem: Callable[[str], None]) -> None:
        """`on_problem` gets each line that reports an error, prefixed with the instance."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._on_problem = on_problem
        self._files: dict[str, BufferedWriter] = {}
        self._tails: dict[str, deque[str]] = {}
        self._combined = self._open("cluster")

    def path(self, instance: str) -> Path:
        """The file of one process."""
        return self._folder / f"{instance}.log"

    def tail(self, instance: str) -> str:
        """The last lines a process wrote."""
        return "\n".join(self._tails.get(instance, ()))

    async def copy(self, instance: str, stream: asyncio.StreamReader) -> None:
        """Write what comes from `stream` until its end."""
        rest = b""
        while chunk := await stream.read(_CHUNK_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > _LONGEST_LINE_BYTES:
                lines, rest = [*lines, rest], b""
            self.write(instance, lines)
        if rest:
            self.write(instance, [rest])

    def write(self, instance: str, lines: Iterable[bytes]) -> None:
        """Add lines, given without their line feeds; readers of the files see them at once."""
        if instance not in self._files:
            self._files[instance] = self._open(instance)
            self._tails[instance] = deque(maxlen=_TAIL_LINES)
        for line in lines:
            self._files[instance].write(line + b"\n")
            self._combined.write(f"{instance:<10} | ".encode() + line + b"\n")
            text = line.decode(errors="replace")
            self._tails[instance].append(text)
            if _PROBLEM.search(line):
                self._on_problem(f"{instance} | {text}")
        self._files[instance].flush()
        self._combined.flush()

    def close(self) -> None:
        """Close all files."""
        for file in (*self._files.values(), self._combined):
            file.close()

    def _open(self, name: str) -> BufferedWriter:
        path = self.path(name)
        if path.exists():
            path.replace(path.with_name(f"{path.name}.1"))
        return path.open("wb")
