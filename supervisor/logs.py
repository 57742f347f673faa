"""Output of the cluster's processes: to files, with problems passed on to the terminal.

.run/logs/cluster.log      everything, each line with its instance: before it, or in its JSON object
.run/logs/decode-0.log     one file a process
.run/logs/decode-0.log.1   what was written before: by the previous run, or before the file reached its size

The processes write to pipes, so this process alone has the files open and renames them between two lines. A
disk that takes nothing more costs lines, and one line says so: the processes run on.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import deque
from collections.abc import Callable, Iterable
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio  # each command imports the constants below, and most need no event loop

MAX_LOG_BYTES = 32 << 20
LOG_FILES = 4
_CHUNK_BYTES = 64 << 10
_LONGEST_LINE_BYTES = 64 << 10
_TAIL_LINES = 15
# The level of libs.common.telemetry.logs's lines, as text or JSON, and of etcd's JSON lines.
_PROBLEM = re.compile(rb'^\S+Z (ERROR|CRITICAL) |^\{("time":"[^"]*",)?"level":"(error|critical|fatal|panic)"')


class ProcessLogs:
    """The log files of one cluster. Each name has at most `n_files` files of about `max_bytes`."""

    def __init__(
        self,
        folder: Path,
        *,
        on_problem: Callable[[str], None],
        max_bytes: int = MAX_LOG_BYTES,
        n_files: int = LOG_FILES,
        is_json: bool = False,
    ) -> None:
        """`on_problem` gets each line that reports an error, prefixed with the instance. `is_json`: the form
        of cluster.log. Raises OSError."""
        self._is_json = is_json
        self._max_bytes = max_bytes
        self._n_files = n_files
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._on_problem = on_problem
        self._files: dict[str, FileIO] = {}
        self._sizes: dict[str, int] = {}
        self._open("cluster")
        self._tails: dict[str, deque[str]] = {}
        self._losing = False

    def path(self, instance: str) -> Path:
        """The file of one process."""
        return self._folder / f"{instance}.log"

    def tail(self, instance: str) -> str:
        """The last lines a process wrote."""
        return "\n".join(self._tails.get(instance, ()))

    def ends_with_problem(self, instance: str) -> bool:
        """Whether the last line of a process reports an error, which `on_problem` got."""
        tail = self._tails.get(instance)
        return tail is not None and len(tail) > 0 and bool(_PROBLEM.search(tail[-1].encode()))

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
        tail = self._tails.setdefault(instance, deque(maxlen=_TAIL_LINES))
        kept = list(lines)
        for line in kept:
            tail.append(text := line.decode(errors="replace"))
            if _PROBLEM.search(line):
                self._on_problem(f"{instance} | {text}")
        try:
            self._append(instance, kept)
            self._append("cluster", [self._of_cluster(instance, line) for line in kept])
        except OSError as error:
            if not self._losing:
                self._on_problem(f"lines are missing in {self._folder}: {error.strerror}")
            self._losing = True
        else:
            self._losing = False

    def _of_cluster(self, instance: str, line: bytes) -> bytes:
        """The line as cluster.log has it."""
        if not self._is_json:
            return f"{instance:<10} | ".encode() + line
        if line.startswith(b'{"') and line.endswith(b"}"):
            return line if b'"instance":' in line else f'{{"instance":"{instance}",'.encode() + line[1:]
        return json.dumps({"instance": instance, "message": line.decode(errors="replace")}).encode()

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            file.close()

    def _append(self, name: str, lines: list[bytes]) -> None:
        data = b"".join([line + b"\n" for line in lines])
        if name not in self._files or (self._sizes[name] and self._sizes[name] + len(data) > self._max_bytes):
            self._open(name)
        rest = memoryview(data)
        while rest:  # a disk with little room takes a part, and says at the next that it is full
            n_bytes = self._files[name].write(rest)
            self._sizes[name] += n_bytes
            rest = rest[n_bytes:]

    def _open(self, name: str) -> None:
        """Begin a new file; the one before it gets the suffix .1, and each older one the next number."""
        path = self.path(name)
        self._sizes[name] = 0  # where no file can be made, the old one takes as many bytes again
        if path.exists():
            names = [path, *(path.with_name(f"{path.name}.{number}") for number in range(1, self._n_files))]
            for newer, older in reversed(list(itertools.pairwise(names))):
                if newer.exists():
                    newer.replace(older)
        file = path.open("wb", buffering=0)
        if name in self._files:
            self._files[name].close()
        self._files[name] = file
