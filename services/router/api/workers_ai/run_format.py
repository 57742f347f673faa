"""Workers AI's runs as a format of answers: OpenAI's shapes in the envelope, or older ones. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from libs.common.http.failure import HttpFailure
from services.router.api.answers.answer_format import (
    AnswerContext,
    AnswerFormat,
    AnswerOptions,
    AnswerWriter,
    ChoicesWriter,
    Json,
    ParsedBody,
)
from services.router.api.openai.answer_format import OpenAiBody
from services.router.api.openai.request import parse_chat
from services.router.api.openai.response import DONE, finish_reason, sse, usage_object
from services.router.api.workers_ai.envelope import JsonModeUnmet, envelope, error_envelope
from services.router.api.workers_ai.run_body import RunBody
from services.router.request.types import GenerationRequest
from slipstream.v1 import router_pb2


class RunFormat(AnswerFormat):
    """The format of one run, whose body is read already: the model is in the path, not in the body."""

    def __init__(self, run: RunBody) -> None:
        self._run = run

    def parse(self, data: bytes, request_id: str) -> ParsedRunBody:
        """`data` is the body that was read."""
        return read_run(self._run, request_id)

    def error_body(self, failure: HttpFailure) -> Mapping[str, Any]:
        return error_envelope(failure)

    def error_events(self, failure: HttpFailure, writer: AnswerWriter | None) -> Iterable[bytes]:
        """The envelope of an error, without [DONE]."""
        return [sse(error_envelope(failure))]


def read_run(run: RunBody, request_id: str) -> ParsedRunBody:
    """The requests of a run. Raises InvalidArgument naming the field."""
    requests, options = parse_chat(run.chat, request_id)
    # Clients of this API take the usage from the stream and never ask for it.
    options = msgspec.structs.replace(options, stream=run.is_streamed, include_usage=run.is_streamed)
    is_native = run.is_native and len(requests) == 1
    chat = OpenAiBody(requests, options, chat=True)
    return ParsedRunBody(chat, is_native=is_native, is_json=run.is_json)


class ParsedRunBody(ParsedBody):
    """A run as its chat completion. `is_json`: the answer's text is one JSON value."""

    def __init__(self, chat: OpenAiBody, *, is_native: bool, is_json: bool) -> None:
        self._chat = chat
        self._is_native = is_native
        self._is_json = is_json
        self.requests: Sequence[GenerationRequest] = chat.requests
        self.options: AnswerOptions = chat.options

    def writer(self, started: router_pb2.Started, context: AnswerContext, index: int = 0) -> AnswerWriter:
        chat = self._chat.writer(started, context, index)
        return RunWriter(chat, is_native=self._is_native, is_json=self._is_json)

    def choices_writer(self, context: AnswerContext) -> ChoicesWriter:
        return RunChoicesWriter(self._chat.choices_writer(context))


class RunWriter(AnswerWriter):
    """A chat completion in the envelope; the events of its stream have none.

    `is_json`: a whole answer that is no JSON fails. A stream is sent by then, and its finish reason says so.
    """

    def __init__(self, chat: AnswerWriter, *, is_native: bool, is_json: bool) -> None:
        self._chat = chat
        self._is_native = is_native
        self._is_json = is_json

    def opening(self) -> bytes:
        return b"" if self._is_native else self._chat.opening()

    def delta_event(self, delta: router_pb2.Delta) -> bytes:
        return sse(native_delta(delta)) if self._is_native else self._chat.delta_event(delta)

    def closing(self, finished: router_pb2.Finished) -> Iterable[bytes]:
        if not self._is_native:
            return self._chat.closing(finished)
        usage = usage_object(finished.usage)
        return [sse({"response": "", "finish_reason": finish_reason(finished), "usage": usage}) + DONE]

    def add(self, delta: router_pb2.Delta) -> None:
        self._chat.add(delta)

    def body(self, finished: router_pb2.Finished) -> Json:
        result = self._chat.body(finished)
        if self._is_json and not is_json_met(result["choices"][0]["message"]):
            raise JsonModeUnmet(finish_reason(finished))
        return envelope(native_result(result, is_json=self._is_json) if self._is_native else result)


class RunChoicesWriter(ChoicesWriter):
    """Several choices: OpenAI's shapes, whole ones in the envelope."""

    def __init__(self, chat: ChoicesWriter) -> None:
        self._chat = chat

    def encode(self, index: int, events: Sequence[router_pb2.GenerateEvent]) -> bytes:
        return self._chat.encode(index, events)

    def last_event(self, leaders: frozenset[int]) -> bytes:
        return self._chat.last_event(leaders)

    def add(self, index: int, events: Sequence[router_pb2.GenerateEvent]) -> None:
        self._chat.add(index, events)

    def body(self, leaders: frozenset[int]) -> Json:
        return envelope(self._chat.body(leaders))


def is_json_met(message: Mapping[str, Any]) -> bool:
    """Whether the message is one JSON value, or calls tools instead."""
    if message.get("tool_calls"):
        return True
    try:
        # As texts: Python makes no integer of more than 4,300 digits.
        json.loads(message["content"] or "", parse_int=str)
    except RecursionError:
        return True
    except ValueError:
        return False
    return True


def native_delta(delta: router_pb2.Delta) -> Json:
    """A piece of an answer as the older event: text, and calls with their name at the top."""
    event: Json = {"response": delta.text}
    if delta.reasoning:
        event["reasoning_content"] = delta.reasoning
    if delta.tool_calls:
        event["tool_calls"] = [_call_piece(call) for call in delta.tool_calls]
    return event


def native_result(chat: Mapping[str, Any], *, is_json: bool = False) -> Json:
    """A chat completion with the older fields beside its own: `response`, and calls with parsed arguments.

    As Workers AI has it, `response` is the value itself where a form of the answer was asked for.
    """
    message = chat["choices"][0]["message"]
    return {**chat, **native_fields(message["content"], message.get("tool_calls") or (), is_json=is_json)}


def native_fields(content: str | None, calls: Sequence[Mapping[str, Any]], *, is_json: bool) -> Json:
    """The older fields alone, of a message's content and its calls."""
    response = content or ""
    fields: Json = {"response": _parsed(response) if is_json else response}
    if calls:
        fields["tool_calls"] = [
            {
                "id": call["id"],
                "name": call["function"]["name"],
                "arguments": _parsed(call["function"]["arguments"]),
            }
            for call in calls
        ]
    return fields


def _call_piece(call: router_pb2.ToolCallDelta) -> Json:
    piece: Json = {"index": call.index, "arguments": call.arguments}
    return piece | {"id": call.id, "name": call.name} if call.id else piece


def _parsed(text: str) -> Any:
    """The value of a JSON text; the text where it was cut, or where Python cannot hold its value."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
