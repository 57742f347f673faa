"""A peer as a subject of the benchmark: peers/child.py runs it with the Python of another venv."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
START_S = 900.0  # vLLM compiles kernels at its first start
ANSWER_S = 1800.0
_SHOWN_LINES = 5


class PeerFailed(Exception):
    """The peer cannot be measured; the message says why."""


class PeerProcess:
    """One peer. Random prompts go to it as tokens, times come back; it counts them with its own clock."""

    torch_threads: int

    def __init__(
        self,
        peer: str,
        python: Path,
        model_dir: Path,
        *,
        threads: int,
        max_batch: int,
        max_tokens: int,
        dtype: str,
        clock: str,
    ) -> None:
        self.name, self.torch_threads = peer, threads
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        command = [str(python), "-m", "bench.engine.peers.child", "--peer", peer]
        command += ["--model", str(model_dir.resolve()), "--threads", str(threads), "--clock", clock]
        command += ["--max-batch", str(max_batch), "--max-tokens", str(max_tokens)]
        command += ["--dtype", dtype]
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=self._log, env=os.environ | {"PYTHONPATH": str(ROOT)}
            )
        except OSError as error:
            raise PeerFailed(f"cannot run --peer-python {python}: {error.strerror}") from None
        try:
            self.version = str(self._read("ready", START_S))
        except PeerFailed:
            self.close()
            raise

    def prefill_s(self, prompt: np.ndarray, clock: Callable[[], float]) -> float:
        """Seconds to the first token, on the peer's clock."""
        return self._ask({"prefill": prompt.tolist()})

    def decode_s(self, prompts: np.ndarray, output_tokens: int, clock: Callable[[], float]) -> float:
        """Seconds of the tokens after the first of each sequence, on the peer's clock."""
        return self._ask({"decode": prompts.tolist(), "output_tokens": output_tokens})

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(timeout=5.0)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()

    def _ask(self, request: dict[str, Any]) -> float:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            pass  # the process has ended: `_read` says why
        return float(self._read("seconds", ANSWER_S))

    def _read(self, field: str, timeout_s: float) -> Any:
        """The field of the next answer, which is one short line."""
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(timeout_s):
                self._process.kill()
                raise PeerFailed(f"{self.name} gave no answer in {timeout_s:.0f} s{self._last_lines()}")
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            raise PeerFailed(f"{self.name} ended with {self._process.returncode}{self._last_lines()}")
        answer = json.loads(line)
        if "error" in answer:
            raise PeerFailed(f"{self.name}: {answer['error']}{self._last_lines()}")
        return answer[field]

    def _last_lines(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()[-_SHOWN_LINES:]
        return "".join([f"\n    {line}" for line in lines])
