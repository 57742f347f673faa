"""Events of a request -> Anthropic's messages: whole bodies and the events of a stream. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from json.encoder import encode_basestring
from typing import Any

import msgspec

from services.router.api.answers.answer_blocks import AnswerBlock, AnswerBlocks, Step
from services.router.api.answers.answer_format import AnswerWriter
from services.router.api.answers.usage_cost import cost_fields
from services.router.api.anthropic.signature import sign
from slipstream.v1 import common_pb2, router_pb2

Json = dict[str, Any]

_STOP_REASONS: Mapping[int, str] = {
    common_pb2.FINISH_REASON_STOP: "end_turn",
    common_pb2.FINISH_REASON_LENGTH: "max_tokens",
    common_pb2.FINISH_REASON_TOOL_CALLS: "tool_use",
}
_DELTAS: Mapping[str, tuple[str, str]] = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


class MessageShape(msgspec.Struct, frozen=True, gc=False):
    """Parts of the request that the writer needs. `shows_thinking` False keeps the thinking's text back."""

    max_tokens: int
    shows_thinking: bool = True


class MessageWriter(AnswerWriter):
    """One answer as it grows."""

    def __init__(self, started: router_pb2.Started, shape: MessageShape) -> None:
        self._started = started
        self._shape = shape
        self._answer = AnswerBlocks()

    # ---- streaming, in server-sent events

    def opening(self) -> bytes:
        """The events before all others."""
        usage = router_pb2.Usage(prompt_tokens=self._started.prompt_tokens)
        start = {"type": "message_start", "message": self._message([], usage)}
        return sse("message_start", start) + sse("ping", {"type": "ping"})

    def delta_event(self, delta: router_pb2.Delta) -> bytes:
        """The events of one piece of the answer."""
        return b"".join([self._step(step) for step in self._answer.add(delta)])

    def closing(self, finished: router_pb2.Finished) -> Iterable[bytes]:
        """The events after all pieces: the stop reason and the usage, whose counts are those of the end."""
        closed = b"".join([self._step(step) for step in self._answer.end()])
        stop = self._stop(finished)
        last = {"type": "message_delta", "delta": stop, "usage": usage_object(finished.usage)}
        yield closed + sse("message_delta", last) + sse("message_stop", {"type": "message_stop"})

    # ---- whole

    def add(self, delta: router_pb2.Delta) -> None:
        """Fold a piece into the whole answer."""
        self._answer.add(delta)

    def body(self, finished: router_pb2.Finished) -> Json:
        """The whole answer, after all pieces were added."""
        content = [self._whole(block) for block in self._answer.blocks]
        return self._message(content, finished.usage) | self._stop(finished)

    # ---- common

    def _message(self, content: list[Json], usage: router_pb2.Usage) -> Json:
        return {
            "id": f"msg_{self._started.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._started.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage_object(usage),
        }

    def _stop(self, finished: router_pb2.Finished) -> Json:
        reason = _STOP_REASONS.get(finished.finish_reason, "end_turn")
        if reason == "max_tokens" and finished.usage.completion_tokens < self._shape.max_tokens:
            reason = "model_context_window_exceeded"
        if finished.stop_string and reason == "end_turn":
            return {"stop_reason": "stop_sequence", "stop_sequence": finished.stop_string}
        return {"stop_reason": reason, "stop_sequence": None}

    def _whole(self, block: AnswerBlock) -> Json:
        match block.kind:
            case "text":
                return {"type": "text", "text": block.text}
            case "reasoning":
                shown = block.text if self._shape.shows_thinking else ""
                return {"type": "thinking", "thinking": shown, "signature": self._signature(block)}
            case "call":
                return _tool_use(block, _input(block.text))

    def _signature(self, block: AnswerBlock) -> str:
        return sign(block.text, is_shown=self._shape.shows_thinking)

    def _step(self, step: Step) -> bytes:
        action, block, text = step
        if action == "open":
            start = {"type": "content_block_start", "index": block.index, "content_block": _empty(block)}
            return sse("content_block_start", start)
        if action == "delta":
            if block.kind == "reasoning" and not self._shape.shows_thinking:
                return b""
            return _delta(block.index, *_DELTAS[block.kind], text)
        signed = b""
        if block.kind == "reasoning":
            signed = _delta(block.index, "signature_delta", "signature", self._signature(block))
        stop = {"type": "content_block_stop", "index": block.index}
        return signed + sse("content_block_stop", stop)


def usage_object(usage: router_pb2.Usage) -> Json:
    """The tokens of an answer, and its cost. What is written to the cache counts as plain input."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
        **cost_fields(usage),
    }


def _empty(block: AnswerBlock) -> Json:
    match block.kind:
        case "text":
            return {"type": "text", "text": ""}
        case "reasoning":
            return {"type": "thinking", "thinking": "", "signature": ""}
        case "call":
            return _tool_use(block, {})


def _tool_use(block: AnswerBlock, given: Json) -> Json:
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": given}


def _input(arguments: str) -> Json:
    """The arguments as an object. What the end of the answer cut off has none."""
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _delta(index: int, kind: str, field: str, text: str) -> bytes:
    """The most frequent event, written without a general encoder."""
    return (
        f"event: content_block_delta\n"
        f'data: {{"type":"content_block_delta","index":{index},'
        f'"delta":{{"type":"{kind}","{field}":{encode_basestring(text)}}}}}\n\n'
    ).encode()


def sse(name: str, event: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(event) + b"\n\n"
