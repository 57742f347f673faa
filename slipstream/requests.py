"""OpenAI-shaped arguments -> `GenerateRequest`. Pure; what is wrong is refused before anything is sent."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from libs.common.errors import InvalidArgument
from slipstream.v1 import router_pb2

Message = Mapping[str, Any]
Tool = Mapping[str, Any]

_MESSAGE_KEYS = {"role", "content", "name", "reasoning_content", "tool_calls", "tool_call_id"}


@dataclass(frozen=True, slots=True)
class Options:
    """How to generate. Unset fields take the model's defaults; bounds are the server's (docs/bounds.md)."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    max_tokens: int | None = None
    top_logprobs: int | None = None
    stop: Sequence[str] = ()
    thinking: bool | None = None

    def apply(self, request: router_pb2.GenerateRequest) -> None:
        """Write the set fields into `request`."""
        for name in (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
            "seed",
            "max_tokens",
            "top_logprobs",
        ):
            value = getattr(self, name)
            if value is not None:
                _set(request.sampling, name, value)
        request.sampling.logit_bias.update(self.logit_bias)
        request.stop.extend([self.stop] if isinstance(self.stop, str) else self.stop)
        if self.thinking is not None:
            request.thinking = self.thinking


def chat_request(
    model: str,
    messages: Sequence[Message],
    *,
    tools: Sequence[Tool] = (),
    tool_choice: str | Mapping[str, Any] | None = None,
    options: Options,
    request_id: str = "",
) -> router_pb2.GenerateRequest:
    """A chat request from OpenAI-shaped messages and tools. Raises InvalidArgument with the field's path."""
    request = router_pb2.GenerateRequest(model=model, request_id=request_id)
    request.chat.SetInParent()
    for index, message in enumerate(messages):
        request.chat.messages.append(_message(message, f"messages[{index}]"))
    for index, tool in enumerate(tools):
        request.chat.tools.append(_tool(tool, f"tools[{index}]"))
    if tool_choice is not None:
        request.chat.tool_choice.CopyFrom(_tool_choice(tool_choice))
    options.apply(request)
    return request


def prompt_request(
    model: str, prompt: str, *, options: Options, request_id: str = ""
) -> router_pb2.GenerateRequest:
    """A plain text completion request."""
    request = router_pb2.GenerateRequest(model=model, prompt=prompt, request_id=request_id)
    options.apply(request)
    return request


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
