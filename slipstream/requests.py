"""OpenAI-shaped arguments -> `GenerateRequest`. Pure; what is wrong is refused before anything is sent."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from libs.common.errors import InvalidArgument
from slipstream.v1 import router_pb2

Message = Mapping[str, Any]
Tool = Mapping[str, Any]

_MESSAGE_KEYS = {"role", "content", "name", "reasoning_content", "tool_calls", "tool_call_id"}


class GenerateArguments(TypedDict, total=False):
    """How to generate. What is left out takes the default; bounds are in docs/bounds.md."""

    model: str
    session: str  # sent as x-session-affinity: later requests of a session find its KV again
    headers: Mapping[str, str]  # further metadata of the call
    timeout_s: float
    request_id: str
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    max_tokens: int
    top_logprobs: int
    ignore_eos: bool
    stop: str | Sequence[str]
    thinking: bool


class ChatArguments(GenerateArguments, total=False):
    """As GenerateArguments, and the tools the model may call, OpenAI-shaped."""

    tools: Sequence[Tool]
    tool_choice: str | Mapping[str, Any]


_SAMPLING = {field.name for field in router_pb2.Sampling.DESCRIPTOR.fields} - {"logit_bias"}
_CALL_ONLY = {"session", "headers", "timeout_s"}


def chat_request(messages: Sequence[Message], arguments: ChatArguments) -> router_pb2.GenerateRequest:
    """A chat request from OpenAI-shaped messages and tools. Raises InvalidArgument with the field's path."""
    request = router_pb2.GenerateRequest()
    request.chat.SetInParent()
    for index, message in enumerate(messages):
        request.chat.messages.append(_message(message, f"messages[{index}]"))
    for index, tool in enumerate(arguments.get("tools", ())):
        request.chat.tools.append(_tool(tool, f"tools[{index}]"))
    if (choice := arguments.get("tool_choice")) is not None:
        request.chat.tool_choice.CopyFrom(_tool_choice(choice))
    rest = {name: value for name, value in arguments.items() if name not in ("tools", "tool_choice")}
    _apply(rest, request)
    return request


def prompt_request(prompt: str, arguments: GenerateArguments) -> router_pb2.GenerateRequest:
    """A plain text completion request. Raises InvalidArgument with the field's path."""
    request = router_pb2.GenerateRequest(prompt=prompt)
    _apply(dict(arguments), request)
    return request


def _apply(arguments: Mapping[str, Any], request: router_pb2.GenerateRequest) -> None:
    for name, value in arguments.items():
        if value is None or name in _CALL_ONLY:
            continue
        if name in _SAMPLING:
            _set(request.sampling, name, value)
        elif name in ("model", "request_id", "thinking"):
            _set(request, name, value)
        elif name == "logit_bias":
            request.sampling.logit_bias.update(value)
        elif name == "stop":
            request.stop.extend([value] if isinstance(value, str) else value)
        else:
            raise TypeError(f"unexpected argument {name!r}")


def _set(target: Any, name: str, value: Any) -> None:
    try:
        setattr(target, name, value)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(name, str(error)) from error


def _message(message: Message, path: str) -> router_pb2.Message:
    if unknown := set(message) - _MESSAGE_KEYS:
        raise InvalidArgument(f"{path}.{min(unknown)}", "unknown field")
    content = message.get("content")
    out = router_pb2.Message()
    if content is not None and not isinstance(content, str):
        parts = [part.get("text") for part in content if part.get("type") == "text"]
        if len(parts) != len(content):
            raise InvalidArgument(f"{path}.content", "only text parts are taken")
        content = "".join(parts)
    for name, value in (("role", message.get("role")), ("content", content)):
        if value is not None:
            _set(out, name, value)
    for name in ("name", "reasoning_content", "tool_call_id"):
        if message.get(name) is not None:
            _set(out, name, message[name])
    for call in message.get("tool_calls") or ():
        function = call["function"]
        out.tool_calls.add(id=call["id"], name=function["name"], arguments=function["arguments"])
    return out


def _tool(tool: Tool, path: str) -> router_pb2.Tool:
    if tool.get("type") != "function" or "function" not in tool:
        raise InvalidArgument(f"{path}.type", 'must be "function"')
    function = tool["function"]
    return router_pb2.Tool(
        name=function.get("name", ""),
        description=function.get("description") or "",
        parameters=json.dumps(function["parameters"]) if function.get("parameters") is not None else "",
    )


def _tool_choice(choice: str | Mapping[str, Any]) -> router_pb2.ToolChoice:
    if isinstance(choice, str):
        return router_pb2.ToolChoice(mode=choice)
    name = choice.get("function", {}).get("name", "")
    return router_pb2.ToolChoice(mode="function", function=name)
