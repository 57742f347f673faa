"""Makes and checks grammars in a process that is killed when it takes too long.

llguidance compiles within one call, which holds no lock of the interpreter and cannot be interrupted. The
process starts with the first grammar of a client.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import BinaryIO, cast

import msgspec

import libs
from libs.common.service_bounds import GRAMMAR_CHECK_S
from libs.structured.answer_grammar import OutputFormat
from libs.structured.check_process import frame, read_frame
from libs.structured.grammar_check import Checked, CheckRequest
from slipstream.errors import InvalidArgument, Unavailable

_ROOT = Path(libs.__file__).parents[1]
# The interpreter and the vocabulary's trie, before the first answer.
_START_S = 30.0
# The process has a low priority, so its CPU time takes longer on a busy machine.
_BUSY_S = 25.0
# Its answer shows that a process has started. The limit of a client's grammar must not include the start. A
# grammar that ended the process before it could make each further one take as long as a start may.
_FIRST = CheckRequest(OutputFormat("regex", "a", "start"))
_CLOSED = "the router ends and checks no more grammars"


class GrammarChecker:
    """One process and its pipe. One thread at a time."""

    def __init__(self, model_dir: Path | None, *, limit_s: float = GRAMMAR_CHECK_S) -> None:
        self._model_dir = model_dir
        self._limit_s = limit_s
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False

    def check(self, request: CheckRequest) -> str:
        """The grammar. Raises InvalidArgument naming the defect, Unavailable."""
        field = request.parts()[0].field
        if self._model_dir is None:
            raise InvalidArgument(field, "is not supported: the router has no tokenizer")
        if self._is_closed:
            raise Unavailable(_CLOSED)
        try:
            process = self._running()
            timed = msgspec.structs.replace(request, limit_cpu_s=self._limit_s)
            body = self._ask(process, frame(timed), time.monotonic() + self._limit_s + _BUSY_S)
        except TimeoutError:
            self._end()
            raise Unavailable("the machine is too busy to check the grammar") from None
        except (OSError, ValueError) as error:  # ValueError: `close` has closed the pipe
            self._end()
            raise Unavailable("the process that checks grammars has ended") from error
        if body is None:
            self._end()
            if self._is_closed:
                raise Unavailable(_CLOSED)
            raise InvalidArgument(field, "is too complex: its check takes too much time or memory")
        checked = msgspec.json.decode(body, type=Checked)
        if checked.reason:
            raise InvalidArgument(checked.field, checked.reason)
        return checked.grammar

    def close(self) -> None:
        """End the process, and check no more: a check that runs raises Unavailable. Idempotent."""
        self._is_closed = True
        self._end()

    def _end(self) -> None:
        """End the process; the next check starts another."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _running(self) -> subprocess.Popen[bytes]:
        """The process, which has answered. Raises Unavailable, OSError."""
        process = self._process
        if process is None or process.poll() is not None:
            process = self._start()
            if self._ask(process, frame(_FIRST), time.monotonic() + _START_S) is None:
                self._end()
                raise Unavailable("the process that checks grammars does not start")
        return process

    def _start(self) -> subprocess.Popen[bytes]:
        self._end()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "libs.structured.check_process", str(self._model_dir), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])},
        )
        return self._process

    @staticmethod
    def _ask(process: subprocess.Popen[bytes], message: bytes, deadline_s: float) -> bytes | None:
        """The answer; None when the process died of the grammar. Raises TimeoutError, OSError."""
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(message)
        process.stdin.flush()
        left_s = deadline_s - time.monotonic()
        ready, _, _ = select.select([process.stdout], [], [], max(left_s, 0.0))
        if not ready:
            raise TimeoutError
        return read_frame(cast(BinaryIO, process.stdout))
