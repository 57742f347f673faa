"""The router's memory of conversations alone: what a turn costs, by the messages before it.

    python -m bench.cache.token_cache --json

A turn brings an answer and the next message, of 20 words each (`--words`), to a conversation of so many
messages; a conversation of none is a single message of 60 new words. "agent" conversations are
one loop of tools, with thinking: every second message is an answer with reasoning and a call, the others are
results. A turn is parsed from JSON as a request is, which is not counted; counted are rendering, finding,
encoding, putting ids together and hashes. Prints `turn_us` for each kind and length: the CPU of a turn, the
median of all rounds.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from bench.command_line import bench_parser
from libs.common.block_hash import tenant_salt
from services.router.request.conversations.token_cache import TokenCache
from services.router.request.model_card import load_model_card
from services.router.request.prompt import PromptDraft
from services.router.request.types import ChatInput, GenerationRequest

ROOT = Path(__file__).resolve().parents[2]
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
        request = GenerationRequest(ChatInput(messages=messages, thinking=thinking))
        draft = PromptDraft.of(request, self._card, self._memory, tenant=_TENANT)
        prompt = draft.finish(draft.encode(), request_id="r")
        prompt.chain(root=b"r" * 16, salt=self._salt, block_tokens=BLOCK_TOKENS)


def rows(kinds: list[tuple[str, int]], *, rounds: int, turns: int, words: int) -> list[dict[str, Any]]:
    """A row for each kind and length."""
    cache = FilledCache(words=words)
    found: list[dict[str, Any]] = []
    for kind, messages in kinds:
        n = turns if messages else 20 * turns  # a short one is over before a clock has moved
        cache.turns(kind, messages, 1)
        us = [cache.turns(kind, messages, n) for _ in range(rounds)]
        found.append({"kind": kind, "messages": messages, "turn_us": round(median(us), 1)})
    return found


def _parser() -> argparse.ArgumentParser:
    parser = bench_parser("cache.token_cache", __doc__)
    parser.add_argument("--messages", default="0,10,300,3000")
    parser.add_argument("--kinds", default="chat,agent")
    parser.add_argument("--words", type=int, default=20, help="of a message")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--turns", type=int, default=10, help="in a row, of a round")
    return parser


def main() -> None:
    """See the module's text."""
    arguments = _parser().parse_args()
    kinds = [(k, int(n)) for k in arguments.kinds.split(",") for n in arguments.messages.split(",")]
    kinds = [(kind, n) for kind, n in kinds if n or kind == "chat"]
    found = rows(kinds, rounds=arguments.rounds, turns=arguments.turns, words=arguments.words)
    if arguments.json:
        print(json.dumps(found, indent=1))
        return
    for row in found:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
