"""The process that checks grammars for a router: requests on stdin, answers on stdout, one after another.

    python -m libs.structured.check_process MODEL_DIR PARENT_PID

A check that uses up its CPU time ends the process, and the router starts another. CPU time, because a good
schema must not be refused for a busy machine.
"""

from __future__ import annotations

import os
import resource
import signal
import struct
import sys
import threading
import time
from pathlib import Path
from typing import BinaryIO

import msgspec

from libs.common.runtime.parent_death import end_with_parent
from libs.structured.grammar_check import MAX_MASK_S, CheckRequest, check_grammar
from libs.structured.vocabulary import GrammarVocabulary
from libs.text.tokenizer import Tokenizer

_LENGTH = struct.Struct("<I")
_MAX_MEMORY_BYTES = 8 << 30
# The router that waits for the answer has streams to serve on the same cores.
_NICENESS = 10
# llguidance recurses. What passes here has room on a worker, whose threads have 8 MiB, those of masks 2 MiB.
_STACK_BYTES = 1 << 20
# The process ends when one mask takes this much CPU time; one beyond MAX_MASK_S refuses its grammar anyway.
_LONGEST_MASK_S = 5 * MAX_MASK_S


def read_frame(stream: BinaryIO) -> bytes | None:
    """One message with its length before it; None at the end of the stream."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (n_bytes,) = _LENGTH.unpack(head)
    body = stream.read(n_bytes)
    return body if len(body) == n_bytes else None


def frame(message: object) -> bytes:
    """A message as it is sent."""
    body = msgspec.json.encode(message)
    return _LENGTH.pack(len(body)) + body


class _CpuLimit:
    """Bounds the CPU time of the process by a signal, which kills amid one long call. 0: no bound."""

    def __init__(self, limit_s: float) -> None:
        self._end_s = time.process_time() + limit_s if limit_s else 0.0
        signal.setitimer(signal.ITIMER_PROF, limit_s)

    def begin_mask(self) -> None:
        """Limit one mask more narrowly."""
        if self._end_s:
            left_s = max(self._end_s - time.process_time(), 0.001)
            signal.setitimer(signal.ITIMER_PROF, min(left_s, _LONGEST_MASK_S))

    def end(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)


def main(model_dir: Path, parent_pid: int) -> None:
    """Answer until stdin or the parent ends."""
    end_with_parent(parent_pid)
    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    vocabulary = GrammarVocabulary.of(Tokenizer.from_dir(model_dir))
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=_answer, args=(vocabulary,), name="check")
    thread.start()
    thread.join()


def _answer(vocabulary: GrammarVocabulary) -> None:
    decoder = msgspec.json.Decoder(CheckRequest)
    while (body := read_frame(sys.stdin.buffer)) is not None:
        request = decoder.decode(body)
        limit = _CpuLimit(request.limit_cpu_s)
        checked = check_grammar(request, vocabulary, before_mask=limit.begin_mask)
        limit.end()
        sys.stdout.buffer.write(frame(checked))
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
