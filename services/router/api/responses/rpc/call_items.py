"""The messages of a Generate call as items, and its fields as a response repeats them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from libs.common import api_bounds
from services.router.api.json_body import Json
from services.router.api.openai.ignored_fields import IgnoredFields
from services.router.api.responses.request import (
    CreateResponseBody,
    ResponseDraft,
    ResponseReasoning,
    TextConfig,
)
from services.router.request.types import ChatInput, GenerationRequest, Message, ToolChoice
from slipstream import bounds
from slipstream.v1 import router_pb2

_TIERS = {"interactive": "priority", "default": "default", "bulk": "flex"}


def draft_of(message: router_pb2.GenerateRequest, request: GenerationRequest) -> ResponseDraft | None:
    """What the call asks of stored responses; None for nothing. Raises InvalidArgument naming the field."""
    if not message.store and not message.previous_response_id:
        return None
    field = "store" if message.store else "previous_response_id"
    if not isinstance(request.input, ChatInput):
        raise api_bounds.STORED_CHAT.refused(field)
    bounds.MESSAGES.check(len(request.input.messages))
    if message.store:
        _check_storable(message, request.input.messages)
    sampling, given = request.sampling, request.sampling.given
    numbers: dict[str, Any] = {name: _rounded(given.get(name)) for name in ("temperature", "top_p")}
    body = CreateResponseBody(
        model=request.model,
        tools=[_tool(tool) for tool in request.input.tools],
        tool_choice=_tool_choice(request.input.tool_choice),
        text=_text_config(request),
        reasoning=ResponseReasoning(effort="none" if request.input.thinking is False else None),
        max_output_tokens=sampling.max_tokens,
        metadata=dict(request.metadata),
        parallel_tool_calls=request.input.parallel_tool_calls,
        top_logprobs=sampling.top_logprobs,
        service_tier=_TIERS.get(request.priority),
        store=message.store,
        previous_response_id=message.previous_response_id or None,
        **numbers,
    )
    return ResponseDraft(body, IgnoredFields(), body.previous_response_id, ())


def _check_storable(message: router_pb2.GenerateRequest, messages: Sequence[Message]) -> None:
    """Raise InvalidArgument for a call whose answer cannot be stored whole."""
    if message.n > 1:
        raise api_bounds.STORED_ONE.refused()
    if message.resume_after_tokens:
        raise api_bounds.STORED_WHOLE.refused()
    for index, item in enumerate(message.chat.messages):
        for name in ("name", "partial"):
            if getattr(item, name):
                raise api_bounds.STORED_MESSAGE.refused(f"messages[{index}].{name}")


def items_of(messages: Sequence[Message]) -> list[Json]:
    """The items of messages: an answer of the model is several. `add_items` makes the messages of them."""
    items: list[Json] = []
    was_answer = False
    for message in messages:
        is_answer = message["role"] == "assistant"
        if is_answer:
            items += _items_of_answer(message, follows_answer=was_answer)
        elif message["role"] == "tool":
            output = {"call_id": message.get("tool_call_id", ""), "output": message["content"]}
            items.append({"type": "function_call_output", **output})
        else:
            items.append({"type": "message", "role": message["role"], "content": message["content"]})
        was_answer = is_answer
    return items


def _items_of_answer(message: Message, *, follows_answer: bool) -> list[Json]:
    items: list[Json] = []
    calls: Sequence[Any] = message.get("tool_calls", ())
    if reasoning := message.get("reasoning_content"):
        content = [{"type": "reasoning_text", "text": reasoning}]
        items.append({"type": "reasoning", "summary": [], "content": content})
    # Calls alone would join the answer before them.
    if message["content"] or not calls or follows_answer:
        items.append({"type": "message", "role": "assistant", "content": message["content"]})
    for call in calls:
        items.append({"type": "function_call", "call_id": call["id"], **call["function"]})
    return items


def _tool(tool: Mapping[str, Any]) -> Json:
    return {"type": "function", **tool["function"]}


def _tool_choice(choice: ToolChoice | None) -> Any:
    if choice is None:
        return None
    if choice.mode == "function":
        return {"type": "function", "name": choice.function}
    if choice.allowed:
        tools = [{"type": "function", "name": name} for name in choice.allowed]
        return {"type": "allowed_tools", "mode": choice.mode, "tools": tools}
    return choice.mode


def _text_config(request: GenerationRequest) -> TextConfig | None:
    """The form of the answer, where a response knows it."""
    output = request.output
    if output is None or output.kind not in ("json_object", "json_schema"):
        return None
    schema = {"name": "answer", "schema": output.content} if output.kind == "json_schema" else {}
    return TextConfig(format={"type": output.kind, **schema})


def _rounded(value: float | None) -> float | None:
    """A number of the message, which has seven digits."""
    return None if value is None else float(f"{value:.7g}")
