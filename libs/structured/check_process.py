"""The process that checks grammars for a router: requests on stdin, answers on stdout, one after another.

    python -m libs.structured.check_process MODEL_DIR

A check that uses up its CPU time ends the process, and the router starts another. CPU time, because a good
schema must not be refused for a busy machine.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
import sys
from pathlib import Path
from typing import BinaryIO

import msgspec

from libs.structured.grammar_check import CheckRequest, check_grammar
from libs.structured.vocabulary import GrammarVocabulary
from libs.text.tokenizer import Tokenizer

_LENGTH = struct.Struct("<I")
_MAX_MEMORY_BYTES = 8 << 30
_PR_SET_PDEATHSIG = 1
# The router that waits for the answer has streams to serve on the same cores.
_NICENESS = 10


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


def main(model_dir: Path) -> None:
    """Answer until stdin ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    vocabulary = GrammarVocabulary.of(Tokenizer.from_dir(model_dir))
    decoder = msgspec.json.Decoder(CheckRequest)
    while (body := read_frame(sys.stdin.buffer)) is not None:
        request = decoder.decode(body)
        signal.setitimer(signal.ITIMER_PROF, request.limit_cpu_s)  # its signal kills, also amid one long call
        checked = check_grammar(request, vocabulary)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(frame(checked))
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
