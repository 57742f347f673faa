"""The types of answers, as the description of the API shows them. Pure.

The writers of answers build plain objects, because they stream them piece by piece. Tests decode answers of a
router as these types, without unknown fields, so that both are the same.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

FinishReason: TypeAlias = Literal["stop", "length", "tool_calls"]


class StrictAnswer(msgspec.Struct, forbid_unknown_fields=True):
    """The base of all: an answer has no other field."""


# ---- chat completions and completions


class TokenLogprob(StrictAnswer):
    token: str
    logprob: float
    bytes: list[int]


class PositionLogprobs(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(StrictAnswer):
    content: list[PositionLogprobs]


class CalledFunction(StrictAnswer):
    name: str
    arguments: str


class CalledTool(StrictAnswer):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatAnswer(StrictAnswer):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CalledTool] | UnsetType = UNSET


class ChatChoice(StrictAnswer):
    index: int
    finish_reason: FinishReason
    message: ChatAnswer
    logprobs: ChatLogprobs | None


class PromptTokensDetails(StrictAnswer):
    cached_tokens: int


class CompletionTokensDetails(StrictAnswer):
    reasoning_tokens: int


class CompletionUsage(StrictAnswer):
    """The cost stands where the model has a price."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails
    cost: float | UnsetType = UNSET
    currency: str | UnsetType = UNSET


class ChatCompletion(StrictAnswer):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: None
    choices: list[ChatChoice]
    usage: CompletionUsage
    prompt_logprobs: list[dict[str, Any] | None] | UnsetType = UNSET
    slipstream: dict[str, Any] | UnsetType = UNSET


class CompletionLogprobs(StrictAnswer):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(StrictAnswer):
    index: int
    finish_reason: FinishReason
    text: str
    logprobs: CompletionLogprobs | None
    prompt_logprobs: list[dict[str, Any] | None] | UnsetType = UNSET


class Completion(StrictAnswer):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: None
    choices: list[CompletionChoice]
    usage: CompletionUsage
    slipstream: dict[str, Any] | UnsetType = UNSET


# ---- responses


class OutputText(StrictAnswer, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any]
    logprobs: list[PositionLogprobs]


class OutputMessage(StrictAnswer, tag_field="type", tag="message"):
    id: str
    status: str
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningText(StrictAnswer):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(StrictAnswer, tag_field="type", tag="reasoning"):
    id: str
    status: str
    summary: list[ReasoningText]
    content: list[ReasoningText]


class FunctionCall(StrictAnswer, tag_field="type", tag="function_call"):
    id: str
    status: str
    call_id: str
    name: str
    arguments: str


class CachedTokens(StrictAnswer):
    cached_tokens: int
    cache_write_tokens: int


class ResponseUsage(StrictAnswer):
    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: CompletionTokensDetails
    total_tokens: int
    cost: float | UnsetType = UNSET
    currency: str | UnsetType = UNSET


class IncompleteDetails(StrictAnswer):
    reason: str


class Response(StrictAnswer):
    """Behind the usage stand the fields that repeat the request."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    error: dict[str, Any] | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[OutputMessage | ReasoningItem | FunctionCall]
    usage: ResponseUsage | None
    background: bool
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: Any
    metadata: dict[str, Any]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: Any
    service_tier: str
    store: bool
    temperature: float | None
    text: dict[str, Any]
    tool_choice: Any
    tools: list[Any]
    top_logprobs: int
    top_p: float | None
    truncation: str
    user: Any
    slipstream: dict[str, Any] | UnsetType = UNSET


class InputTokens(StrictAnswer):
    object: Literal["response.input_tokens"]
    input_tokens: int


# ---- messages


class TextBlock(StrictAnswer, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(StrictAnswer, tag_field="type", tag="thinking"):
    thinking: str
    signature: str


class ToolUseBlock(StrictAnswer, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class ThinkingTokens(StrictAnswer):
    thinking_tokens: int


class MessageUsage(StrictAnswer):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens
    cost: float | UnsetType = UNSET
    currency: str | UnsetType = UNSET


class Message(StrictAnswer):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: Literal[
        "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
    ]
    stop_sequence: str | None
    usage: MessageUsage
    slipstream: dict[str, Any] | UnsetType = UNSET


class MessageTokens(StrictAnswer):
    input_tokens: int


# ---- tokens


class Tokens(StrictAnswer):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class TokensText(StrictAnswer):
    prompt: str


class TokenizerInfo(StrictAnswer):
    tokenizer_class: str | None
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    additional_special_tokens: list[str | None]
    chat_template: str | None
    model_max_length: int


# ---- Workers AI


class RunErrorItem(StrictAnswer):
    code: int
    message: str


class RunEnvelope(StrictAnswer):
    """Workers AI's envelope, of answers and of errors."""

    result: Any
    success: bool
    errors: list[RunErrorItem]
    messages: list[Any]
