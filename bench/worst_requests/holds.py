"""The longest time for which one request keeps the router's event loop from running, in processor time.

    python -m bench.worst_requests.holds [--json] [--rounds 3] [--only tools]

Processor time is reliable on a busy machine, where the gaps of bench.worst_requests are not. The worst
requests of each kind pass through the functions that the router calls, in this process. What the router runs
on threads is measured by how long it keeps the interpreter's lock: another thread asks for the lock again and
again, and notes the processor time that this process used meanwhile. What the router runs on its event loop
is measured whole, with the router's settings of the garbage collector. A figure is the least of all rounds.
Pure Python keeps the lock for 5 ms. Aim: 50 ms.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from bench.command_line import bench_parser
from bench.worst_requests import bodies, messages
from bench.worst_requests.parsers import PARSERS
from libs.common.runtime.heap import freeze_heap
from services.router.api.content_encoding import decompress
from services.router.execution.prompt_encoding import INLINE_CHARS, INLINE_MESSAGES
from services.router.request.conversations.token_cache import TokenCache
from services.router.request.model_card import ModelCard, load_model_card
from services.router.request.output_constraints import OutputConstraints
from services.router.request.prompt import PromptDraft, query_of
from services.router.request.prompt_encoder import PromptEncoder
from services.router.request.types import ChatInput, GenerationRequest
from services.router.request.validation import validate
from slipstream import bounds
from slipstream.errors import SlipstreamError
from supervisor.configuration.cluster_options import DEFAULT_MODEL

AIM_MS = 50.0
CONTEXT_TOKENS = 1 << 18  # of Kimi-K2.5
_ASK_S = 0.0005
_Parse: TypeAlias = Callable[[], GenerationRequest | None]


class LockWatch:
    """Another thread that asks for the interpreter's lock, and keeps the longest wait in processor time."""

    def __init__(self) -> None:
        self.longest_ms = 0.0
        self._ended = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Measure what the block does on this thread."""
        asked = threading.Event()
        thread = threading.Thread(target=self._ask, args=(asked,), name="lock-watch", daemon=True)
        self._ended = False
        thread.start()
        asked.wait()
        try:
            yield
        finally:
            self._ended = True
            thread.join()

    def _ask(self, asked: threading.Event) -> None:
        asked.set()
        last_s = time.process_time()
        while not self._ended:
            time.sleep(_ASK_S)
            now_s = time.process_time()
            self.longest_ms = max(self.longest_ms, (now_s - last_s) * 1e3)
            last_s = now_s


class Pieces:
    """One request's way through the router, with the cost of each piece of work."""

    def __init__(self, card: ModelCard) -> None:
        self.hold_ms: dict[str, float] = {}
        self._card = card

    def run(self, parse: _Parse) -> str:
        """Returns how the request ended: "encoded", "parsed" alone, or the field of its refusal."""
        try:
            request = self._on_thread("parse", parse)
            if request is None:
                return "parsed"
            self._on_thread("check", partial(self._validate, request))
            self._constrain(request)
            draft_of = partial(PromptDraft.of, request, self._card, TokenCache(), tenant="t", query=None)
            if isinstance(request.input, ChatInput) and len(request.input.messages) > INLINE_MESSAGES:
                query = query_of(request.input, self._card, tenant="t")
                self._on_thread("render", partial(query.render, 0))
                draft_of = partial(draft_of, query=query)
            draft = self._on_loop("draft", draft_of)
            is_short = draft.new_chars <= INLINE_CHARS and draft.new_messages <= INLINE_MESSAGES
            if is_short:  # all of it at once
                del self.hold_ms["draft"]
                self._on_loop("encode", lambda: draft_of().finish(draft.encode(), request_id="r"))
                return "encoded"
            encoder, encoded = PromptEncoder(draft), None
            while encoded is None:
                encoded = self._on_thread("encode", encoder.step)
            self._on_loop("finish", partial(draft.finish, encoded, request_id="r"))
        except SlipstreamError as error:
            return f"refused: {getattr(error, 'field', '')[:40]}"
        return "encoded"

    def _validate(self, request: GenerationRequest) -> None:
        validate(request, models=[], vocab_size=self._card.vocab_size, max_context_tokens=CONTEXT_TOKENS)

    def _constrain(self, request: GenerationRequest) -> None:
        """The check of a new schema or grammar, whose process starts with it."""
        constraints = OutputConstraints(self._card)
        try:
            if not self._on_loop("look up", partial(constraints.is_known, request)):
                self._on_thread("constrain", partial(constraints.make, request))
            self._on_loop("constraint", partial(constraints.make, request))
        finally:
            constraints.close()

    def _on_thread(self, name: str, work: Callable[[], Any]) -> Any:
        watch = LockWatch()
        try:
            with watch.watching():
                return work()
        finally:
            self._note(name, watch.longest_ms)

    def _on_loop(self, name: str, work: Callable[[], Any]) -> Any:
        began_s = time.thread_time()
        try:
            return work()
        finally:
            self._note(name, (time.thread_time() - began_s) * 1e3)

    def _note(self, name: str, ms: float) -> None:
        self.hold_ms[name] = max(self.hold_ms.get(name, 0.0), ms)


def kinds() -> Mapping[str, Callable[[], _Parse]]:
    """Of each kind what makes its bytes, and returns what parses them."""

    def of_http(name: str) -> _Parse:
        request = bodies.KINDS[name]()
        parse = PARSERS[request.path]
        return lambda: parse(decompress(request.body, request.encoding))

    def of_grpc(name: str) -> _Parse:
        request = messages.KINDS[name]()
        return partial(PARSERS[request.method], request.message)

    return {f"HTTP {name}": partial(of_http, name) for name in bodies.KINDS} | {
        f"gRPC {name}": partial(of_grpc, name) for name in messages.KINDS
    }


def measure(name: str, parse: _Parse, card: ModelCard, rounds: int) -> dict[str, Any]:
    """The row of one kind."""
    least: dict[str, float] = {}
    ended = ""
    for _ in range(rounds):
        pieces = Pieces(card)
        ended = pieces.run(parse)
        least = {what: min(ms, least.get(what, ms)) for what, ms in pieces.hold_ms.items()}
    rounded = {what: round(ms, 1) for what, ms in least.items()}
    return {"kind": name, "ended": ended, "hold_ms": rounded, "longest_ms": max(rounded.values())}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = bench_parser("worst_requests.holds", __doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="kinds whose name has this text")
    options = parser.parse_args(argv)
    card = replace(load_model_card(DEFAULT_MODEL), model_context_tokens=CONTEXT_TOKENS)
    freeze_heap()
    rows = []
    for name, make in kinds().items():
        if options.only in name:
            rows.append(measure(name, make(), card, options.rounds))
            if not options.json:
                row = rows[-1]
                print(
                    f"{name:44} {row['longest_ms']:7.1f} ms  {row['ended']:32} {row['hold_ms']}", flush=True
                )
    report = {
        "cores": os.cpu_count(),
        "body_bytes": bounds.MAX_BODY_BYTES,
        "kinds": rows,
        "longest_ms": max((row["longest_ms"] for row in rows), default=0.0),
        "above_aim": [row["kind"] for row in rows if row["longest_ms"] > AIM_MS],
    }
    if options.json:
        print(json.dumps(report))
    return 1 if report["above_aim"] else 0


if __name__ == "__main__":
    sys.exit(main())
