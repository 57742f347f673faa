"""Events of a request -> OpenAI's response shapes: whole bodies and stream chunks. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from json.encoder import encode_basestring
from typing import Any

from slipstream.enum_names import transport_name
from slipstream.v1 import common_pb2, router_pb2

Json = dict[str, Any]

_FINISH: Mapping[int, str] = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
}
_TIERS: Mapping[int, str] = {
    common_pb2.CACHE_TIER_WORKER: "worker",
    common_pb2.CACHE_TIER_DRAM: "dram",
    common_pb2.CACHE_TIER_NVME: "nvme",
    common_pb2.CACHE_TIER_POOL: "pool",
    common_pb2.CACHE_TIER_PEER: "peer",
}
DONE = b"data: [DONE]\n\n"
_BEFORE_CONTENT = b'{"index":0,"finish_reason":null,"delta":{"content":'
_AFTER_CONTENT = b'},"logprobs":null}'
_OPENING = b'{"index":0,"finish_reason":null,"delta":{"role":"assistant","content":""},"logprobs":null}'


class ResponseWriter:
    """One answer as it grows. `chat` False: the shape of /v1/completions, where reasoning is text."""

    def __init__(
        self, started: router_pb2.Started, *, chat: bool, include_usage: bool, with_stats: bool
    ) -> None:
        self._started = started
        self._chat = chat
        self._include_usage = include_usage
        self._with_stats = with_stats
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[Json] = []
        self._logprobs: list[router_pb2.TextLogprob] = []
        self._before = b"data: " + _dumps(self._head(".chunk"))[:-1] + b',"choices":['
        self._after = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"

    # ---- streaming, in server-sent events

    def opening(self) -> bytes:
        """The event before all others; completions have none."""
        return self._before + _OPENING + self._after if self._chat else b""

    def delta_event(self, delta: router_pb2.Delta) -> bytes:
        """One piece of the answer. Events of plain content differ in their text alone."""
        if not self._chat:
            return self._event({"text": delta.reasoning + delta.text}, delta.logprobs, None)
        if delta.text and not (delta.reasoning or delta.tool_calls or delta.logprobs):
            return b"".join(
                (
                    self._before,
                    _BEFORE_CONTENT,
                    encode_basestring(delta.text).encode(),
                    _AFTER_CONTENT,
                    self._after,
                )
            )
        return self._event(_piece(delta), delta.logprobs, None)

    def closing(self, finished: router_pb2.Finished) -> bytes:
        """The finish reason, the usage and the statistics where they were asked for, and the end mark."""
        finish = _FINISH.get(finished.finish_reason, "stop")
        piece = '"delta":{}' if self._chat else '"text":""'
        last = f'{{"index":0,"finish_reason":"{finish}",{piece},"logprobs":null}}'.encode()
        stats = b""
        if self._with_stats:
            stats = b',"slipstream":' + _dumps(stats_object(finished))
        if not self._include_usage:
            return self._before + last + b"]" + stats + b"}\n\n" + DONE
        usage = b'],"usage":' + _dumps(_usage(finished.usage)) + stats + b"}\n\n"
        return self._before + last + self._after + self._before + usage + DONE

    # ---- whole

    def add(self, delta: router_pb2.Delta) -> None:
        """Fold a piece into the whole answer."""
        self._text.append(delta.text)
        self._reasoning.append(delta.reasoning)
        self._logprobs.extend(delta.logprobs)
        for piece in delta.tool_calls:
            while len(self._calls) <= piece.index:
                self._calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
            call = self._calls[piece.index]
            call["id"] = piece.id or call["id"]
            call["function"]["name"] = piece.name or call["function"]["name"]
            call["function"]["arguments"] += piece.arguments

    def body(self, finished: router_pb2.Finished) -> Json:
        """The whole answer, after all pieces were added."""
        finish = _FINISH.get(finished.finish_reason, "stop")
        text, reasoning = "".join(self._text), "".join(self._reasoning)
        choice: Json = {"index": 0, "finish_reason": finish}
        if self._chat:
            # As OpenAI: an answer of tool calls alone has null content.
            message: Json = {"role": "assistant", "content": text or (None if self._calls else "")}
            message["refusal"] = None
            if reasoning:
                message["reasoning_content"] = reasoning
            if self._calls:
                message["tool_calls"] = self._calls
            choice |= {"message": message, "logprobs": _chat_logprobs(self._logprobs)}
        else:
            choice |= {"text": reasoning + text, "logprobs": _completion_logprobs(self._logprobs)}
        body = {**self._head(), "choices": [choice], "usage": _usage(finished.usage)}
        if self._with_stats:
            body["slipstream"] = stats_object(finished)
        return body

    # ---- common

    def _head(self, kind: str = "") -> Json:
        """What a whole body and each chunk of a stream begin with. `kind`: ".chunk" for a chunk."""
        name, prefix = ("chat.completion" + kind, "chatcmpl") if self._chat else ("text_completion", "cmpl")
        started = self._started
        return {
            "id": f"{prefix}-{started.request_id}",
            "object": name,
            "created": started.created_unix_s,
            "model": started.model,
            "system_fingerprint": None,
        }

    def _choice(self, piece: Json, logprobs: Any, finish: str | None) -> Json:
        choice: Json = {"index": 0, "finish_reason": finish}
        if self._chat:
            return choice | {"delta": piece, "logprobs": _chat_logprobs(logprobs)}
        return choice | {**piece, "logprobs": _completion_logprobs(logprobs)}

    def _event(self, piece: Json, logprobs: Any, finish: str | None) -> bytes:
        """A chunk with one choice between the text that all chunks share."""
        return self._before + _dumps(self._choice(piece, logprobs, finish)) + self._after


def _piece(delta: router_pb2.Delta) -> Json:
    piece: Json = {}
    if delta.reasoning:
        piece["reasoning_content"] = delta.reasoning
    if delta.text:
        piece["content"] = delta.text
    if delta.tool_calls:
        piece["tool_calls"] = [_call_piece(call) for call in delta.tool_calls]
    return piece


def _dumps(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def sse(chunk: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + _dumps(chunk) + b"\n\n"


def stats_object(finished: router_pb2.Finished) -> Json:
    """Where the request ran and what it took, by the field names of `RequestStats`."""
    stats = finished.stats
    values: Json = {field.name: getattr(stats, field.name) for field in stats.DESCRIPTOR.fields}
    values["transport"] = transport_name(stats.transport)
    for name in ("ttft_ms", "decode_ms", "acceptance_length"):
        values[name] = round(values[name], 3)
    values["cached_tokens_by_tier"] = {
        _TIERS.get(item.tier, "unknown"): item.tokens for item in finished.usage.cached
    }
    return values


def _usage(usage: router_pb2.Usage) -> Json:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def _call_piece(call: router_pb2.ToolCallDelta) -> Json:
    function: Json = {"arguments": call.arguments}
    if not call.id:
        return {"index": call.index, "function": function}
    return {
        "index": call.index,
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, **function},
    }


def _chat_logprobs(items: Any) -> Json | None:
    if not items:
        return None
    return {"content": [{**_token(i), "top_logprobs": [_token(t) for t in i.top]} for i in items]}


def _completion_logprobs(items: Any) -> Json | None:
    if not items:
        return None
    return {
        "tokens": [item.token for item in items],
        "token_logprobs": [item.logprob for item in items],
        "top_logprobs": [{top.token: top.logprob for top in item.top} for item in items],
    }


def _token(item: router_pb2.TextLogprob) -> Json:
    return {"token": item.token, "logprob": item.logprob, "bytes": list(item.token_bytes)}
