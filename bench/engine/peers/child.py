"""python -m bench.engine.peers.child: one peer, driven by JSON lines. Runs in the peer's venv.

Standard input has one request a line, standard output one answer a line; all that the peer itself prints
goes to standard error. The first answer comes when the model is loaded:

    {"ready": "vllm 0.32.0"}
    {"prefill": [tokens]}                              {"seconds": 1.2}
    {"decode": [[tokens], ..], "output_tokens": 128}   {"seconds": 3.4}, of the tokens after the first ones

An answer {"error": text} is the last one. The process ends at the end of its input.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

_MODULES = {
    "vllm": "vllm_peer",
    "vllm-compiled": "vllm_peer",
    "llama.cpp": "llama_cpp_peer",
    "transformers": "transformers_peer",
}


@dataclass(frozen=True, slots=True)
class PeerOptions:
    """What a peer loads, and how much it must hold."""

    model_dir: Path
    threads: int
    max_batch: int
    max_tokens: int  # of a sequence
    dtype: str  # torch's name of that of weights and products
    compiled: bool = False


class EnginePeer(Protocol):
    """An engine in this process. Greedy, end tokens ignored. Times are of `clock`."""

    version: str

    def prefill_s(self, prompt: list[int], clock: Callable[[], float]) -> float:
        """Time to the first token."""
        ...

    def decode_s(self, prompts: list[list[int]], output_tokens: int, clock: Callable[[], float]) -> float:
        """Time of the tokens after the first of each sequence."""
        ...


def serve(peer: EnginePeer, requests: TextIO, answers: TextIO, clock: Callable[[], float]) -> None:
    """Answer until the end of the input."""
    _answer(answers, {"ready": peer.version})
    for line in requests:
        request = json.loads(line)
        if "prefill" in request:
            seconds = peer.prefill_s(request["prefill"], clock)
        else:
            seconds = peer.decode_s(request["decode"], request["output_tokens"], clock)
        _answer(answers, {"seconds": seconds})


def _answer(answers: TextIO, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


def _start_with(wanted: dict[str, str]) -> None:
    """Start again where the environment is another one: a process reads LD_PRELOAD as it starts."""
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        command = [sys.executable, "-m", "bench.engine.peers.child", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | wanted)


def main() -> int:
    """Load the peer and serve; 1 when it failed."""
    parser = argparse.ArgumentParser(prog="python -m bench.engine.peers.child")
    parser.add_argument("--peer", choices=list(_MODULES), required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--max-batch", type=int, required=True)
    parser.add_argument("--max-tokens", type=int, required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--clock", choices=["wall", "cpu"], required=True)
    options = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    clock = time.process_time if options.clock == "cpu" else time.perf_counter
    try:
        module = importlib.import_module(f"bench.engine.peers.{_MODULES[options.peer]}")
        if hasattr(module, "environment"):
            _start_with(module.environment(options.threads))
        os.dup2(2, 1)  # a peer's own output is no answer
        peer: EnginePeer = module.load(
            PeerOptions(
                options.model,
                options.threads,
                options.max_batch,
                options.max_tokens,
                options.dtype,
                compiled=options.peer.endswith("-compiled"),
            )
        )
        serve(peer, sys.stdin, answers, clock)
    except ModuleNotFoundError as error:
        _answer(answers, {"error": f"{sys.executable} has no module {error.name}"})
        return 1
    except Exception as error:
        _answer(answers, {"error": f"{type(error).__name__}: {error}"})
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
