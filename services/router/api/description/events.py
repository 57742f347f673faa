"""The types of the events of streams, as the description of the API shows them. Pure.

Tests decode the streams of a router as these types, without unknown fields, so that both are the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from services.router.api.description.answers import (
    ChatLogprobs,
    CompletionLogprobs,
    CompletionUsage,
    FinishReason,
    FunctionCall,
    MessageUsage,
    OutputMessage,
    PositionLogprobs,
    ReasoningItem,
    Response,
    RunEnvelope,
    StrictAnswer,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
)
from services.router.api.description.error_bodies import Error, MessagesError

# ---- chat completions and completions, whose streams end with [DONE]


class FunctionPiece(StrictAnswer):
    arguments: str
    name: str | UnsetType = UNSET


class CallPiece(StrictAnswer):
    index: int
    function: FunctionPiece
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatPiece(StrictAnswer):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CallPiece] | UnsetType = UNSET


class ChatChunkChoice(StrictAnswer):
    index: int
    finish_reason: FinishReason | None
    delta: ChatPiece
    logprobs: ChatLogprobs | None


class ChatChunk(StrictAnswer):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: None
    choices: list[ChatChunkChoice]
    usage: CompletionUsage | UnsetType | None = UNSET
    prompt_logprobs: list[dict[str, Any] | None] | UnsetType = UNSET
    slipstream: dict[str, Any] | UnsetType = UNSET


class CompletionChunkChoice(StrictAnswer):
    index: int
    finish_reason: FinishReason | None
    text: str
    logprobs: CompletionLogprobs | None
    prompt_logprobs: list[dict[str, Any] | None] | UnsetType = UNSET


class CompletionChunk(StrictAnswer):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: None
    choices: list[CompletionChunkChoice]
    usage: CompletionUsage | UnsetType | None = UNSET
    slipstream: dict[str, Any] | UnsetType = UNSET


# ---- responses


class NumberedResponseEvent(StrictAnswer):
    """The base of all; the numbers of a stream grow from 0."""

    sequence_number: int


class ResponseStateEvent(NumberedResponseEvent):
    type: Literal[
        "response.created",
        "response.queued",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    response: Response


class OutputItemEvent(NumberedResponseEvent):
    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputMessage | ReasoningItem | FunctionCall


class ItemPartEvent(NumberedResponseEvent):
    """The base of events about an item."""

    item_id: str
    output_index: int


class OutputTextPart(StrictAnswer, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any]
    logprobs: list[PositionLogprobs]


class ReasoningTextPart(StrictAnswer, tag_field="type", tag="reasoning_text"):
    text: str


class SummaryTextPart(StrictAnswer, tag_field="type", tag="summary_text"):
    text: str


class ContentPartEvent(ItemPartEvent):
    type: Literal["response.content_part.added", "response.content_part.done"]
    content_index: int
    part: OutputTextPart | ReasoningTextPart


class SummaryPartEvent(ItemPartEvent):
    type: Literal["response.reasoning_summary_part.added", "response.reasoning_summary_part.done"]
    summary_index: int
    part: SummaryTextPart


class OutputTextDelta(ItemPartEvent):
    type: Literal["response.output_text.delta"]
    content_index: int
    delta: str
    logprobs: list[PositionLogprobs]


class OutputTextDone(ItemPartEvent):
    type: Literal["response.output_text.done"]
    content_index: int
    text: str
    logprobs: list[PositionLogprobs]


class ReasoningTextDelta(ItemPartEvent):
    type: Literal["response.reasoning_text.delta"]
    content_index: int
    delta: str


class ReasoningTextDone(ItemPartEvent):
    type: Literal["response.reasoning_text.done"]
    content_index: int
    text: str


class SummaryTextDelta(ItemPartEvent):
    type: Literal["response.reasoning_summary_text.delta"]
    summary_index: int
    delta: str


class SummaryTextDone(ItemPartEvent):
    type: Literal["response.reasoning_summary_text.done"]
    summary_index: int
    text: str


class CallArgumentsDelta(ItemPartEvent):
    type: Literal["response.function_call_arguments.delta"]
    delta: str


class CallArgumentsDone(ItemPartEvent):
    type: Literal["response.function_call_arguments.done"]
    name: str
    arguments: str


class ResponseErrorEvent(NumberedResponseEvent):
    type: Literal["error"]
    code: str
    message: str
    param: str | None


# ---- messages


class StartedMessage(StrictAnswer):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Any]
    stop_reason: None
    stop_sequence: None
    usage: MessageUsage


class MessageStartEvent(StrictAnswer):
    type: Literal["message_start"]
    message: StartedMessage


class PingEvent(StrictAnswer):
    type: Literal["ping"]


class BlockStartEvent(StrictAnswer):
    type: Literal["content_block_start"]
    index: int
    content_block: TextBlock | ThinkingBlock | ToolUseBlock


class TextDelta(StrictAnswer, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(StrictAnswer, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignatureDelta(StrictAnswer, tag_field="type", tag="signature_delta"):
    signature: str


class InputJsonDelta(StrictAnswer, tag_field="type", tag="input_json_delta"):
    partial_json: str


class BlockDeltaEvent(StrictAnswer):
    type: Literal["content_block_delta"]
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class BlockStopEvent(StrictAnswer):
    type: Literal["content_block_stop"]
    index: int


class MessageStop(StrictAnswer):
    stop_reason: str
    stop_sequence: str | None


class MessageDeltaEvent(StrictAnswer):
    type: Literal["message_delta"]
    delta: MessageStop
    usage: MessageUsage


class MessageStopEvent(StrictAnswer):
    type: Literal["message_stop"]


# ---- Workers AI


class RunEvent(StrictAnswer):
    response: str
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[Any] | UnsetType = UNSET
    finish_reason: FinishReason | UnsetType = UNSET
    usage: CompletionUsage | UnsetType = UNSET


# The types of the events of each API's streams, the failure among them.
EVENTS: Mapping[str, Sequence[type[msgspec.Struct]]] = {
    "/v1/chat/completions": (ChatChunk, Error),
    "/v1/completions": (CompletionChunk, Error),
    "/v1/responses": (
        ResponseStateEvent,
        OutputItemEvent,
        ContentPartEvent,
        SummaryPartEvent,
        OutputTextDelta,
        OutputTextDone,
        ReasoningTextDelta,
        ReasoningTextDone,
        SummaryTextDelta,
        SummaryTextDone,
        CallArgumentsDelta,
        CallArgumentsDone,
        ResponseErrorEvent,
    ),
    "/ai/run": (RunEvent, ChatChunk, RunEnvelope),
    "/v1/messages": (
        MessageStartEvent,
        PingEvent,
        BlockStartEvent,
        BlockDeltaEvent,
        BlockStopEvent,
        MessageDeltaEvent,
        MessageStopEvent,
        MessagesError,
    ),
}
