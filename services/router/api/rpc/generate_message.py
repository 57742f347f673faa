"""Parses `GenerateRequest` messages into `GenerationRequest`. Pure.

Errors name fields by their paths in the HTTP body.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from libs.structured.answer_grammar import OutputFormat
from services.router.api.responses.request import ResponseDraft
from services.router.api.responses.rpc.call_items import draft_of
from services.router.api.rpc.wire.message_reader import read_message
from services.router.request.choices import split_choices
from services.router.request.json_limits import check_structure
from services.router.request.token_ids import listed
from services.router.request.token_texts import check_count
from services.router.request.types import ChatInput, GenerationRequest, PromptInput, Sampling, ToolChoice
from slipstream import bounds
from slipstream.enum_names import MESSAGE_ROLES, PRIORITIES, TOOL_CHOICE_MODES
from slipstream.requests import MESSAGE_TEXTS
from slipstream.sampling import SAMPLING_RANGES
from slipstream.v1 import router_pb2


class ParsedCall(msgspec.Struct, frozen=True, gc=False):
    """A call's requests, one for each answer, and whether the prompt's text stands before the answers'.

    `draft`: what the call asks of stored responses; None: nothing.
    """

    requests: Sequence[GenerationRequest]
    echo: bool = False
    draft: ResponseDraft | None = None


def parse_call(data: bytes, request_id: str = "") -> ParsedCall:
    """The call in `data`. Raises InvalidArgument naming the first bad field.

    `request_id` is the metadata's; the message's own comes first.
    """
    message = read_message(data, router_pb2.GenerateRequest)
    has_prompt = message.WhichOneof("input") in ("prompt", "token_ids")
    if message.echo and not has_prompt:
        raise bounds.UNSUPPORTED.refused("echo")
    sampling = message.sampling
    is_prompt_alone = has_prompt and sampling.HasField("max_tokens") and sampling.max_tokens == 0
    if is_prompt_alone:
        sampling.max_tokens = 1
    request = parse_generation(message, request_id)
    if is_prompt_alone:
        request = msgspec.structs.replace(request, is_prompt_alone=True)
    draft = draft_of(message, request)
    requests: Sequence[GenerationRequest] = (request,)
    if message.n > 1:
        bounds.N.check(message.n)
        if request.resume_after_tokens:
            raise bounds.RESUME_ONE.refused()
        requests = split_choices(request, [request.input], n=message.n)
    return ParsedCall(requests, message.echo and not request.resume_after_tokens, draft)


def parse_tokenized(data: bytes) -> ParsedCall:
    """The call whose prompt Tokenize shows. Raises as `parse_call` does."""
    message = read_message(data, router_pb2.TokenizeRequest).request
    request = parse_generation(message)
    return ParsedCall((request,), draft=draft_of(message, request))


def parse_generation(message: router_pb2.GenerateRequest, request_id: str = "") -> GenerationRequest:
    """The request in the message. validation.py checks its values."""
    kind = message.WhichOneof("input")
    if kind is None:
        raise bounds.INPUT.refused()
    # Copying an empty list or map of a message takes as long as reading all its numbers.
    return GenerationRequest(
        input=_chat(message) if kind == "chat" else _prompt(message, kind),
        model=message.model,
        sampling=_sampling(message.sampling),
        stop=tuple(message.stop) if message.stop else (),
        output=_output(message.output) if message.HasField("output") else None,
        request_id=message.request_id or request_id,
        resume_after_tokens=message.resume_after_tokens,
        metadata=dict(message.metadata) if message.metadata else {},
        priority=_priority(message.priority),
        reject_if_busy=message.reject_if_busy,
    )


def _prompt(message: router_pb2.GenerateRequest, kind: str) -> PromptInput:
    if kind == "prompt":
        return PromptInput(message.prompt)
    if not message.token_ids.ids:
        raise bounds.PROMPT_EMPTY.refused()
    check_count(message.token_ids.ids, "prompt")
    return PromptInput(token_ids=tuple(listed(message.token_ids.ids)))


def _priority(priority: router_pb2.Priority.ValueType) -> str:
    name = PRIORITIES.find(priority) if priority else ""
    if name is None:
        raise bounds.PRIORITY.refused("priority")
    return name


def _sampling(message: router_pb2.Sampling) -> Sampling:
    """The fields that are set, which have the same names in `Sampling`."""
    plain: dict[str, float] = {}
    others: dict[str, Any] = {}
    for field, value in message.ListFields():
        (plain if field.name in SAMPLING_RANGES else others)[field.name] = value
    if "stop_token_ids" in others:
        bounds.STOP_TOKENS.check(len(message.stop_token_ids))  # before each becomes an object
        others["stop_token_ids"] = tuple(message.stop_token_ids)
    if "logit_bias" in others:
        others["logit_bias"] = dict(message.logit_bias)
    return Sampling(given=plain, **others)


def _output(output: router_pb2.OutputFormat) -> OutputFormat | None:
    """The form of the answer. Its field is that of an HTTP body that asks for the same."""
    match output.WhichOneof("kind"):
        case "json_object":
            return OutputFormat("json_object") if output.json_object else None
        case "json_schema":
            field = "response_format.json_schema.schema"
            check_structure([(field, output.json_schema.encode())])
            try:
                return OutputFormat("json_schema", json.loads(output.json_schema), field)
            except (ValueError, RecursionError):
                raise bounds.OUTPUT_SCHEMA.refused(field) from None
        case "regex":
            return OutputFormat("regex", output.regex, "guided_regex")
        case "choice":
            return OutputFormat("choice", list(output.choice.texts), "guided_choice")
        case "grammar":
            return OutputFormat("lark", output.grammar, "guided_grammar")
        case _:
            return None


def _chat(message: router_pb2.GenerateRequest) -> ChatInput:
    chat = message.chat
    # Empty items cost two bytes each: their counts are bounded before any is converted.
    if len(chat.messages) > bounds.MESSAGES.high:
        bounds.MESSAGES.check(len(chat.messages))
    if len(chat.tools) > bounds.MAX_TOOLS:
        raise bounds.TOOLS.refused(count=len(chat.tools))
    # Their texts of JSON are values in an HTTP body.
    check_structure([("body", tool.parameters.encode()) for tool in chat.tools])
    return ChatInput(
        messages=[_message(item, index) for index, item in enumerate(chat.messages)],
        tools=[_tool(item, f"tools[{index}]") for index, item in enumerate(chat.tools)] if chat.tools else (),
        tool_choice=_tool_choice(chat),
        thinking=message.thinking if message.HasField("thinking") else None,
        keeps_reasoning=message.keeps_reasoning,
        parallel_tool_calls=not message.HasField("parallel_tool_calls") or message.parallel_tool_calls,
        partial=_partial(chat.messages),
    )


def _partial(messages: Sequence[router_pb2.Message]) -> str:
    """The field that asks to continue the last message. Raises InvalidArgument for an earlier message."""
    for index, item in enumerate(messages):
        if item.partial:
            if index + 1 < len(messages):
                raise bounds.PARTIAL.refused(f"messages[{index}].partial")
            return f"messages[{index}].partial"
    return ""


def _message(item: router_pb2.Message, index: int) -> Mapping[str, Any]:
    message: dict[str, Any] = {"role": MESSAGE_ROLES.name(item.role), "content": _content(item, index)}
    for name in MESSAGE_TEXTS:
        if text := getattr(item, name):
            message[name] = text
    if item.tool_calls:
        message["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments or "{}"}}
            for c in item.tool_calls
        ]
    return message


def _content(item: router_pb2.Message, index: int) -> str:
    """The parts as one text. Raises InvalidArgument for too many parts, and for a part without text."""
    parts = item.content
    bounds.CONTENT_PARTS.check(len(parts), f"messages[{index}].content")
    for number, part in enumerate(parts):
        if not part.HasField("text"):
            raise bounds.TYPE.refused(f"messages[{index}].content[{number}].text", expected="a string")
    return parts[0].text if len(parts) == 1 else "".join([part.text for part in parts])


def _tool(item: router_pb2.Tool, path: str) -> Mapping[str, Any]:
    function: dict[str, Any] = {"name": item.name}
    if item.description:
        function["description"] = item.description
    if item.parameters:
        try:
            function["parameters"] = _decoded(item.parameters)
        except (ValueError, RecursionError):
            raise bounds.TOOL_JSON.refused(f"{path}.function.parameters") from None
    if item.strict:
        function["strict"] = True
    return {"type": "function", "function": function}


def _decoded(text: str) -> Any:
    """The value of a JSON text. Raises ValueError or RecursionError."""
    try:
        value: Any = msgspec.json.decode(text)  # in a third of the time
        return value
    except (msgspec.DecodeError, RecursionError):
        return json.loads(text)  # takes numbers without a finite value, and halves of surrogate pairs


def _tool_choice(chat: router_pb2.Chat) -> ToolChoice | None:
    if not chat.HasField("tool_choice") or not chat.tool_choice.mode:
        return None
    mode: Any = TOOL_CHOICE_MODES.find(chat.tool_choice.mode)
    if mode is None:
        raise bounds.TOOL_CHOICE.refused()
    return ToolChoice(mode, chat.tool_choice.function, tuple(chat.tool_choice.allowed))
