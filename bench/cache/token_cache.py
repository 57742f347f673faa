"""The router's memory of conversations alone: what a turn costs, by the messages before it.

    python -m bench.cache.token_cache --json
    python -m bench.cache.token_cache --against d10606f     # the router of another commit beside it, in turn

A turn brings an answer and the next message, of 20 words each (`--words`), to a conversation of so many
messages; a conversation of none is a single message of 60 new words. "agent" conversations are
one loop of tools, with thinking: every second message is an answer with reasoning and a call, the others are
results. A turn is parsed from JSON as a request is, which is not counted; counted are rendering, finding,
encoding, putting ids together and hashes. Prints for each kind and length, for each side

    turn_us     CPU of a turn, median of all rounds
    ratio       of this tree's to the other's, median of the rounds' own

Both sides are processes that take turns, a few turns each round.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import IO, Any

from bench.another_tree import ROOT, another_tree
from bench.command_line import bench_parser

BLOCK_TOKENS = 64
_FIRST_WORDS = 60
_TENANT = "t"
_VOCABULARY = (
    "order",
    "parcel",
    "refund",
    "invoice",
    "please",
    "where",
    "is",
    "the",
    "address",
    "when",
    "will",
)

Message = dict[str, Any]


def _text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(_VOCABULARY) + str(rng.randrange(1000)) for _ in range(words))


def turn_of(rng: random.Random, kind: str, number: int, *, words: int) -> list[Message]:
    """An answer and what follows it."""
    said, next_ = _text(rng, words), _text(rng, words)
    if kind == "chat":
        return [{"role": "assistant", "content": said}, {"role": "user", "content": next_}]
    arguments = json.dumps({"query": said})
    name = f"functions.search:{number}"
    call = {"id": name, "type": "function", "function": {"name": "search", "arguments": arguments}}
    return [
        {"role": "assistant", "content": "", "reasoning_content": _text(rng, words), "tool_calls": [call]},
        {"role": "tool", "content": next_, "tool_call_id": name},
    ]


class FilledCache:
    """A memory with the conversations that a row needs."""

    def __init__(self, *, words: int) -> None:
        from libs.common.block_hash import tenant_salt
        from services.router.request.conversations.token_cache import TokenCache
        from services.router.request.model_card import load_model_card

        self._words = words
        card = load_model_card(ROOT / "models" / "slipstream-mini")
        self._card = replace(card, model_context_tokens=1 << 24)
        self._memory = TokenCache()
        self._salt = tenant_salt(_TENANT)
        self._rng = random.Random(7)
        self._talks: dict[tuple[str, int], list[Message]] = {}

    def turns(self, kind: str, messages: int, n: int) -> float:
        """CPU of one of `n` turns, in microseconds."""
        requests = [self._request(kind, messages) for _ in range(n)]
        begin = time.process_time_ns()
        for request in requests:
            self._run(request, thinking=kind == "agent")
        return (time.process_time_ns() - begin) / 1e3 / n

    def _request(self, kind: str, messages: int) -> list[Message]:
        if not messages:
            return [{"role": "user", "content": _text(self._rng, _FIRST_WORDS)}]
        talk = self._talks.get((kind, messages))
        if talk is None:
            talk = [{"role": "user", "content": _text(self._rng, self._words)}]
            while len(talk) < messages:
                talk += turn_of(self._rng, kind, len(talk), words=self._words)
            self._talks[kind, messages] = talk
            self._run(json.loads(json.dumps(talk)), thinking=kind == "agent")
        talk += turn_of(self._rng, kind, len(talk), words=self._words)
        parsed: list[Message] = json.loads(json.dumps(talk))
        return parsed

    def _run(self, messages: list[Message], *, thinking: bool) -> None:
        from services.router.request.prompt import PromptDraft
        from services.router.request.types import ChatInput, GenerationRequest

        request = GenerationRequest(ChatInput(messages=messages, thinking=thinking))
        draft = PromptDraft.of(request, self._card, self._memory, tenant=_TENANT)
        prompt = draft.finish(draft.encode(), request_id="r")
        prompt.chain(root=b"r" * 16, salt=self._salt, block_tokens=BLOCK_TOKENS)


def _serve(words: int) -> None:
    side = FilledCache(words=words)
    for line in sys.stdin:
        kind, messages, n = line.split()
        print(side.turns(kind, int(messages), int(n)), flush=True)


@contextlib.contextmanager
def _child(tree: Path, words: int) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "bench.cache.token_cache", "--serve", "--words", str(words)]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    with subprocess.Popen(
        command, cwd=tree, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        try:
            yield child
        finally:
            _pipe(child.stdin).close()


def _pipe(end: IO[str] | None) -> IO[str]:
    assert end is not None
    return end


def _ask(child: subprocess.Popen[str], kind: str, messages: int, n: int) -> float:
    stdin = _pipe(child.stdin)
    stdin.write(f"{kind} {messages} {n}\n")
    stdin.flush()
    return float(_pipe(child.stdout).readline())


def rows(
    trees: dict[str, Path], kinds: list[tuple[str, int]], *, rounds: int, turns: int, words: int
) -> list[dict[str, Any]]:
    """A row for each kind and length. The first of `trees` is the one that others are compared with."""
    with contextlib.ExitStack() as stack:
        children = {name: stack.enter_context(_child(tree, words)) for name, tree in trees.items()}
        found: list[dict[str, Any]] = []
        for kind, messages in kinds:
            n = turns if messages else 20 * turns  # a short one is over before a clock has moved
            us: dict[str, list[float]] = {name: [] for name in trees}
            for child in children.values():
                _ask(child, kind, messages, 1)
            for round_ in range(rounds):
                for name in sorted(trees, reverse=bool(round_ % 2)):
                    us[name].append(_ask(children[name], kind, messages, n))
            this, *others = us
            found.append(
                {
                    "kind": kind,
                    "messages": messages,
                    "turn_us": {name: round(median(values), 1) for name, values in us.items()},
                    "ratio": {
                        name: round(median(a / b for a, b in zip(us[this], us[name], strict=True)), 3)
                        for name in others
                    },
                }
            )
        return found


def _parser() -> argparse.ArgumentParser:
    parser = bench_parser("cache.token_cache", __doc__)
    parser.add_argument("--messages", default="0,10,300,3000")
    parser.add_argument("--kinds", default="chat,agent")
    parser.add_argument("--words", type=int, default=20, help="of a message")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--turns", type=int, default=10, help="in a row, of a round")
    parser.add_argument("--against", default="", help="a commit")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    return parser


def main() -> None:
    """See the module's text."""
    arguments = _parser().parse_args()
    if arguments.serve:
        _serve(arguments.words)
        return
    kinds = [(k, int(n)) for k in arguments.kinds.split(",") for n in arguments.messages.split(",")]
    kinds = [(kind, n) for kind, n in kinds if n or kind == "chat"]
    with tempfile.TemporaryDirectory(prefix="token-memory-") as folder:
        trees = {"now": ROOT}
        if arguments.against:
            trees[arguments.against] = another_tree(arguments.against, Path(folder), benchmark=Path(__file__))
        found = rows(trees, kinds, rounds=arguments.rounds, turns=arguments.turns, words=arguments.words)
    if arguments.json:
        print(json.dumps(found, indent=1))
        return
    for row in found:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
