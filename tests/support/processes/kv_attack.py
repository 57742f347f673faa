"""An attack on KV beside live requests: the attacker's process, and what it has written so far."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support.clusters.local_cluster import PATIENCE_S


class KvAttack:
    """A running `kv_attacker`."""

    def __init__(self, process: subprocess.Popen[bytes], output: Path, log: Path) -> None:
        self._process = process
        self._output = output
        self._log = log

    def regions(self) -> list[list[tuple[int, int]]]:
        """The bytes of each region of each process, and how many of them were overwritten.

        Fails if the attacker has ended.
        """
        assert self._process.poll() is None, self._log.read_text(errors="replace")[-2000:]
        whole = [line for line in self._output.read_text().splitlines() if line.endswith("}")]
        return list(json.loads(whole[-1]).values()) if whole else []


@contextmanager
def attacked(pids: Sequence[int], directory: Path) -> Iterator[KvAttack]:
    """An attack on the processes until the end of the block; the directory gets two files."""
    output, log = directory / "attacker.txt", directory / "attacker.log"
    with output.open("wb") as lines, log.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.processes.kv_attacker", *map(str, pids)],
            stdin=subprocess.PIPE,
            stdout=lines,
            stderr=errors,
        )
        try:
            yield KvAttack(process, output, log)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(timeout=PATIENCE_S)
            finally:
                process.kill()
                process.wait(timeout=PATIENCE_S)
