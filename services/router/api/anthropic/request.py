"""JSON bodies of /v1/messages and /v1/messages/count_tokens -> `GenerationRequest`. Pure.

As in the bodies of OpenAI's API, a null field counts as left out. Unknown fields are ignored and named, and
those that would change the answer are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from libs.common import api_bounds
from libs.structured.answer_grammar import OutputFormat
from services.router.api.answers.field_paths import FieldPaths
from services.router.api.anthropic.errors import FIELD_NAMES
from services.router.api.anthropic.messages import MessageParam, parse_messages
from services.router.api.anthropic.tools import parse_tool_choice, parse_tools
from services.router.api.json_body import Flag, Number, Text, WholeNumber, decode_body, read_object
from services.router.api.openai.ignored_fields import IgnoredFields
from services.router.api.openai.sampling_body import stated_of
from services.router.api.openai.unsupported import ANSWER_CHANGING, SWITCHES_OF_CHAT
from services.router.request.types import ChatInput, GenerationRequest, Sampling
from services.router.request.validation import is_session
from slipstream import bounds
from slipstream.bound import shown_name

_EFFORTS = frozenset({"low", "medium", "high", "xhigh", "max"})
_MIN_BUDGET = 1024
# Features of Anthropic's service, and options of OpenAI's API by other names here.
_REFUSED: Mapping[str, tuple[object, ...]] = {
    **ANSWER_CHANGING,
    **{name: values for name, values in SWITCHES_OF_CHAT.items() if name != "thinking"},
    "container": (),
    "frequency_penalty": (0,),
    "inference_geo": ("global",),
    "logit_bias": ({},),
    "max_completion_tokens": (),
    "mcp_servers": ([],),
    "min_p": (0,),
    "n": (1,),
    "presence_penalty": (0,),
    "reasoning": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "seed": (),
    "stop": ("", []),
}
# Fields that are taken and have no effect here. Marks of the cache are not among them: every prefix is kept.
_HINTS = ("service_tier", "speed", "diagnostics", "user_profile_id", "workspace_id")


class _Metadata(msgspec.Struct, forbid_unknown_fields=True):
    user_id: Text = None


class _Thinking(msgspec.Struct, forbid_unknown_fields=True):
    type: Text = None
    budget_tokens: WholeNumber = None
    display: Text = None


class _OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    effort: Text = None
    format: Any = None


class _Format(msgspec.Struct, forbid_unknown_fields=True):
    type: Text = None
    schema: Any = None


class _ContextManagement(msgspec.Struct, forbid_unknown_fields=True):
    edits: list[Any] | None = None


class _CountBody(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """The fields that make the prompt."""

    model: Text = None
    messages: list[MessageParam] | None = None
    system: Any = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    thinking: _Thinking | None = None
    output_config: _OutputConfig | None = None
    output_format: Any = None
    context_management: _ContextManagement | None = None
    cache_control: Any = None
    service_tier: Any = None
    speed: Any = None
    diagnostics: Any = None
    user_profile_id: Any = None
    workspace_id: Any = None

    REFUSED: ClassVar[Mapping[str, tuple[object, ...]]] = _REFUSED


class _MessagesRequestBody(_CountBody):
    max_tokens: WholeNumber = None
    stream: Flag = None
    stop_sequences: list[Any] | None = None
    temperature: Number = None
    top_p: Number = None
    top_k: WholeNumber = None
    metadata: _Metadata | None = None


MESSAGES_BODIES: Mapping[str, type[msgspec.Struct]] = {
    "/v1/messages": _MessagesRequestBody,
    "/v1/messages/count_tokens": _CountBody,
}
_MESSAGES = msgspec.json.Decoder(_MessagesRequestBody)
_COUNT = msgspec.json.Decoder(_CountBody)


class MessagesRequest(msgspec.Struct, frozen=True):
    """A parsed body: the request, and how its answer is written.

    `shows_thinking` False leaves the text of its thinking out. `ignored` names fields without effect.
    """

    generation: GenerationRequest
    paths: FieldPaths
    ignored: IgnoredFields
    stream: bool = False
    shows_thinking: bool = True
    session: str | None = None


def parse_messages_body(data: bytes, request_id: str = "") -> MessagesRequest:
    """A body of /v1/messages. Raises InvalidArgument naming the first field that does not fit."""
    ignored = IgnoredFields()
    body = decode_body(data, _MESSAGES, ignored.add)
    if body.max_tokens is None:
        raise api_bounds.MAX_TOKENS.refused()
    chat, paths = _chat(body, ignored)
    thinking, given = body.thinking, _sampling_fields(body)
    if thinking is not None and thinking.budget_tokens is not None and chat.thinking:
        if not _MIN_BUDGET <= thinking.budget_tokens < body.max_tokens:
            raise api_bounds.BUDGET.refused()
        ignored.add("thinking.budget_tokens")
    user_id = body.metadata.user_id if body.metadata is not None else None
    sampling = Sampling(given=given, max_tokens=body.max_tokens)
    generation = GenerationRequest(
        input=chat,
        model=body.model or "",
        sampling=sampling,
        stop=_stop(body.stop_sequences) if body.stop_sequences else (),
        output=_output(body, ignored),
        request_id=request_id,
        metadata={"user_id": user_id} if user_id else {},
        is_capped_by_context=True,
    )
    return MessagesRequest(
        generation,
        paths,
        ignored,
        stream=body.stream is True,
        shows_thinking=thinking is None or thinking.display != "omitted",
        session=user_id if user_id and is_session(user_id) else None,
    )


def parse_count_body(data: bytes) -> MessagesRequest:
    """A body of /v1/messages/count_tokens, as `parse_messages_body`."""
    ignored = IgnoredFields()
    body = decode_body(data, _COUNT, ignored.add)
    chat, paths = _chat(body, ignored)
    return MessagesRequest(GenerationRequest(chat, model=body.model or ""), paths, ignored)


def _chat(body: _CountBody, ignored: IgnoredFields) -> tuple[ChatInput, FieldPaths]:
    if not body.messages:
        raise bounds.INPUT.refused()
    for name in _HINTS:
        if getattr(body, name) is not None:
            ignored.add(name)
    sources = parse_messages(body.messages, body.system, ignored.add)
    choice, parallel = parse_tool_choice(body.tool_choice, ignored.add)
    thinking, is_prefilled = _thinking(body.thinking), body.messages[-1].role == "assistant"
    if thinking and is_prefilled:
        raise api_bounds.PREFILL_THINKING.refused()
    chat = ChatInput(
        messages=sources.messages,
        tools=parse_tools(body.tools, ignored.add) if body.tools else (),
        tool_choice=choice,
        thinking=thinking,
        keeps_reasoning=_keeps_thinking(body.context_management, ignored),
        parallel_tool_calls=parallel,
        partial=f"messages[{len(body.messages) - 1}]" if is_prefilled else "",
    )
    return chat, FieldPaths(sources.paths, FIELD_NAMES)


def _thinking(given: _Thinking | None) -> bool:
    """Whether the model thinks first. As in Anthropic's API, it does so only where it is asked to."""
    if given is None:
        return False
    if given.type not in ("enabled", "adaptive", "disabled"):
        raise api_bounds.THINKING.refused()
    return given.type != "disabled"


def _keeps_thinking(given: _ContextManagement | None, ignored: IgnoredFields) -> bool:
    """Whether the thinking of all earlier answers stays in the prompt. Other edits are refused by name."""
    keeps = False
    for index, edit in enumerate((given and given.edits) or ()):
        path = f"context_management.edits[{index}]"
        kind = edit.get("type") if isinstance(edit, dict) else None
        if kind != "clear_thinking_20251015":
            raise api_bounds.EDITS.refused(f"{path}.type", kind=shown_name(str(kind)))
        if edit.get("keep") == "all":
            keeps = True
        else:
            ignored.add(f"{path}.keep")
    return keeps


def _output(body: _CountBody, ignored: IgnoredFields) -> OutputFormat | None:
    """The schema that the answer's text has to fit, by its newer and its older name."""
    config = body.output_config
    if config is not None and config.effort is not None:
        if config.effort not in _EFFORTS:
            raise api_bounds.OUTPUT_EFFORT.refused()
        ignored.add("output_config.effort")
    for path, given in (
        ("output_config.format", config and config.format),
        ("output_format", body.output_format),
    ):
        if given is None:
            continue
        form = read_object(given, _Format, ignored.add, path)
        if form.type != "json_schema":
            raise api_bounds.OUTPUT_FORMAT.refused(f"{path}.type")
        if not isinstance(form.schema, Mapping | bool):
            raise bounds.OUTPUT_SCHEMA.refused(f"{path}.schema")
        return OutputFormat("json_schema", form.schema, f"{path}.schema")
    return None


def _sampling_fields(body: _MessagesRequestBody) -> Mapping[str, float]:
    return stated_of({"temperature": body.temperature, "top_p": body.top_p, "top_k": body.top_k})


def _stop(given: Sequence[Any]) -> Sequence[str]:
    for index, text in enumerate(given):
        if not isinstance(text, str):
            raise bounds.TYPE.refused(f"stop_sequences[{index}]", expected="a string")
    return [text for text in given if text]
