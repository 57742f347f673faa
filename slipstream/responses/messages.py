"""Stored responses as the SDK shows them, from the messages of ResponseService. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slipstream.enum_names import value_name
from slipstream.replies import ToolCall, Usage, usage_of
from slipstream.v1 import responses_pb2, router_pb2

_ENDED = frozenset({"completed", "incomplete", "failed", "cancelled"})


@dataclass(frozen=True, slots=True)
class ConversationItem:
    """One piece of a conversation. `kind`: message, reasoning, tool_call or tool_result.

    `text` is that of the message or of the reasoning, and the output of a tool.
    """

    id: str
    kind: str
    text: str = ""
    role: str = ""  # of a message: user, assistant, system, developer
    tool_call: ToolCall | None = None
    tool_call_id: str = ""  # of a result: the call that it answers


@dataclass(frozen=True, slots=True)
class SavedResponse:
    """A stored response as of one moment.

    `status`: queued, in_progress, completed, incomplete (at the limit of tokens), failed or cancelled.
    """

    id: str
    status: str
    model: str
    previous_response_id: str
    instructions: str
    output: tuple[ConversationItem, ...]
    usage: Usage | None  # None before the end
    metadata: Mapping[str, str]
    created_unix_s: float
    error_code: str  # server_error, rate_limit_exceeded or invalid_prompt; empty unless it failed
    error: str  # why it failed

    @property
    def ended(self) -> bool:
        """Whether it never changes again."""
        return self.status in _ENDED

    @property
    def text(self) -> str:
        """The text of the answer, without its reasoning."""
        return "".join([item.text for item in self.output if item.kind == "message"])

    @property
    def reasoning(self) -> str:
        """What the model reasoned."""
        return "".join([item.text for item in self.output if item.kind == "reasoning"])

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The calls that the model makes."""
        return [item.tool_call for item in self.output if item.tool_call is not None]


def saved_response(response: responses_pb2.Response) -> SavedResponse:
    """The response of a message."""
    return SavedResponse(
        id=response.id,
        status=value_name(responses_pb2.ResponseStatus, response.status),
        model=response.model,
        previous_response_id=response.previous_response_id,
        instructions=response.instructions,
        output=tuple([conversation_item(item) for item in response.output]),
        usage=usage_of(response.usage) if response.HasField("usage") else None,
        metadata=dict(response.metadata),
        created_unix_s=response.created_unix_s,
        error_code=value_name(responses_pb2.ResponseErrorCode, response.error_code)
        if response.error_code
        else "",
        error=response.error,
    )


def conversation_item(item: responses_pb2.ResponseItem) -> ConversationItem:
    """The item of a message."""
    kind = item.WhichOneof("kind") or "unknown"
    if kind == "tool_call":
        call = item.tool_call
        return ConversationItem(item.id, kind, tool_call=ToolCall(call.id, call.name, call.arguments))
    if kind == "tool_result":
        result = item.tool_result
        return ConversationItem(item.id, kind, result.output, tool_call_id=result.tool_call_id)
    if kind == "message":
        text = "".join([part.text for part in item.message.content])
        return ConversationItem(item.id, kind, text, value_name(router_pb2.MessageRole, item.message.role))
    return ConversationItem(item.id, kind, item.reasoning)
