"""JSON bodies of /v1/responses -> `GenerationRequest`. Pure.

Reading has two steps, because a body may refer to answers in the database. `decode_response` says to which,
and `parse_response` makes the request when they are there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from libs.common import api_bounds
from libs.structured.answer_grammar import OutputFormat
from services.router.api.answers.field_paths import FieldPaths, MessageSources
from services.router.api.json_body import Flag, Json, Text, WholeNumber, decode_body, path_of
from services.router.api.openai.ignored_fields import IgnoredFields
from services.router.api.openai.request import (
    metadata_of,
    priority_of,
    session_of,
    stop_strings,
)
from services.router.api.openai.sampling_body import SamplingBody, stated_numbers
from services.router.api.openai.thinking import ReasoningOptions, thinks_of
from services.router.api.openai.unsupported import (
    ANSWER_CHANGING,
    OF_CHAT_ONLY,
    OF_COMPLETIONS_ONLY,
    SWITCHES_OF_CHAT,
)
from services.router.api.responses.errors import FIELD_NAMES
from services.router.api.responses.items import add_items, kind_of
from services.router.api.responses.tools import parse_response_choice, parse_response_tools
from services.router.request.types import ChatInput, GenerationRequest, Sampling
from slipstream import bounds

_SUMMARIES = ("auto", "concise", "detailed", "none")
_LOGPROBS = "message.output_text.logprobs"
# Fields that are taken and have no effect here.
_HINTS = ("max_tool_calls", "safety_identifier", "prompt_cache_retention", "user")
_FORMAT_FIELDS = frozenset({"type", "name", "description", "schema", "strict"})


class _EventStreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_obfuscation: Any = None


class ResponseReasoning(ReasoningOptions):
    """Whether the model reasons, and how the reasoning is shown."""

    summary: Text = None
    generate_summary: Text = None  # an older name


class TextConfig(msgspec.Struct, forbid_unknown_fields=True):
    """The form of the answer's text."""

    format: dict[str, Any] | None = None
    verbosity: Any = None


class CreateResponseBody(SamplingBody, forbid_unknown_fields=True, gc=False):
    """OpenAI's fields, and the sampling numbers of chat."""

    model: Text = None
    input: Any = None
    instructions: Text = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    text: TextConfig | None = None
    reasoning: ResponseReasoning | None = None
    max_output_tokens: WholeNumber = None
    seed: WholeNumber = None
    stop: Any = None
    metadata: dict[str, Any] | None = None
    parallel_tool_calls: Flag = None
    truncation: Text = None
    include: list[Any] | None = None
    top_logprobs: WholeNumber = None
    store: Flag = None
    previous_response_id: Text = None
    stream: Flag = None
    stream_options: _EventStreamOptions | None = None
    service_tier: Text = None
    prompt_cache_key: Text = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None
    user: Any = None
    max_tool_calls: Any = None
    background: Flag = None

    # Besides those of chat: features of OpenAI's service, and fields of a chat body by other names here.
    REFUSED: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **{name: values for name, values in ANSWER_CHANGING.items() if name != "background"},
        **OF_COMPLETIONS_ONLY,
        **OF_CHAT_ONLY,
        **SWITCHES_OF_CHAT,
        "context_management": ([],),
        "conversation": (),
        "ignore_eos": (False,),
        "logit_bias": ({},),
        "max_completion_tokens": (),
        "max_tokens": (),
        "messages": (),
        "min_tokens": (0,),
        "moderation": (),
        "n": (1,),
        "prompt": (),
        "response_format": ({"type": "text"},),
        "stop_token_ids": ([],),
    }


RESPONSE_BODIES: Mapping[str, type[msgspec.Struct]] = {"/v1/responses": CreateResponseBody}
_DECODER = msgspec.json.Decoder(CreateResponseBody)


class ResponseDraft(msgspec.Struct, frozen=True):
    """A decoded body. `previous_id` and `references` name what the database has to supply."""

    body: Any
    ignored: IgnoredFields
    previous_id: str | None
    references: Sequence[str]

    @property
    def wants_store(self) -> bool | None:
        """Whether the answer shall be stored; None: where a database is there."""
        return self.body.store  # type: ignore[no-any-return]

    @property
    def is_background(self) -> bool:
        """Whether a job shall run it."""
        return self.body.background is True


class EarlierItems(msgspec.Struct, frozen=True):
    """The items that the database supplies: those before the input, and those referred to, by id.

    `n_bytes` is the length of all of them as JSON, each as often as the body refers to it. `n_read_bytes` is
    that of all stored responses that were read for them.
    """

    items: Sequence[Json] = ()
    by_id: Mapping[str, Json] = {}
    n_bytes: int = 0
    n_read_bytes: int = 0


class ResponsesRequest(msgspec.Struct, frozen=True):
    """A parsed body: the request, and how its answer is written.

    `echo` are the fields of the answer that repeat the body; `items` is the input as it is stored.
    """

    generation: GenerationRequest
    paths: FieldPaths
    ignored: IgnoredFields
    echo: Json
    items: Sequence[Json]
    stream: bool
    has_summary: bool
    session: str | None


def decode_response(data: bytes) -> ResponseDraft:
    """A body whose types are right. Raises InvalidArgument naming the first field that does not fit."""
    ignored = IgnoredFields()
    body = decode_body(data, _DECODER, ignored.add)
    if not isinstance(body.input, str | list):
        raise api_bounds.INPUT.refused()
    references = []
    if isinstance(body.input, list):
        api_bounds.INPUT_ITEMS.check(len(body.input))
        for index, item in enumerate(body.input):
            if isinstance(item, dict) and kind_of(item) == "item_reference":
                if not isinstance(item.get("id"), str):
                    raise bounds.TYPE.refused(f"input[{index}].id", expected="a string")
                references.append(item["id"])
    return ResponseDraft(body, ignored, body.previous_response_id, references)


def parse_response(
    draft: ResponseDraft, earlier: EarlierItems, *, is_stored: bool, request_id: str = ""
) -> ResponsesRequest:
    """The request of a decoded body. Raises InvalidArgument naming the first field that does not fit."""
    body, ignored = draft.body, draft.ignored
    items = input_items(body.input, earlier)
    sources = _messages(body, items, earlier, ignored)
    reasoning = body.reasoning or ResponseReasoning()
    chat = ChatInput(
        messages=sources.messages,
        tools=parse_response_tools(body.tools, ignored.add) if body.tools else (),
        tool_choice=parse_response_choice(body.tool_choice, ignored.add),
        thinking=thinks_of(reasoning, api_bounds.EFFORT),
        parallel_tool_calls=body.parallel_tool_calls is not False,
    )
    generation = GenerationRequest(
        input=chat,
        model=body.model or "",
        sampling=_sampling(body),
        stop=stop_strings(body.stop),
        output=_output(body.text, ignored),
        request_id=request_id,
        metadata=metadata_of(body.metadata) if body.metadata else {},
        priority=priority_of(body.service_tier) if body.service_tier else "",
    )
    _note_hints(body, ignored)
    return ResponsesRequest(
        generation,
        FieldPaths(sources.paths, FIELD_NAMES),
        ignored,
        echo=echo_of(draft, is_stored=is_stored),
        items=items,
        stream=body.stream is True,
        has_summary=_summary(reasoning) not in (None, "none"),
        session=session_of(body.prompt_cache_key) if body.prompt_cache_key else None,
    )


def input_items(given: str | list[Any], earlier: EarlierItems) -> list[Json]:
    """The input as items, references replaced by what they refer to."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": given}]}]
    items: list[Json] = []
    for item in given:
        if isinstance(item, dict) and kind_of(item) == "item_reference":
            item = earlier.by_id[item["id"]]
        items.append(item)
    return items


def _messages(
    body: CreateResponseBody, items: Sequence[Json], earlier: EarlierItems, ignored: IgnoredFields
) -> MessageSources:
    into = MessageSources()
    if body.instructions:
        into.add({"role": "system", "content": body.instructions}, "instructions")
    before = [("previous_response_id", item) for item in earlier.items]
    paths = ["input"] if isinstance(body.input, str) else [f"input[{index}]" for index in range(len(items))]
    add_items(into, [*before, *zip(paths, items, strict=True)], ignored.add)
    return into


def _summary(given: ResponseReasoning) -> str | None:
    """How long the summary of the reasoning is to be. Any is the reasoning itself."""
    summary = given.summary if given.summary is not None else given.generate_summary
    if summary is not None and summary not in _SUMMARIES:
        raise api_bounds.SUMMARY.refused()
    return summary


def _sampling(body: CreateResponseBody) -> Sampling:
    wants_logprobs = body.top_logprobs is not None or _LOGPROBS in (body.include or ())
    return Sampling(
        given=stated_numbers(body),
        seed=body.seed,
        max_tokens=body.max_output_tokens,
        max_tokens_field="max_output_tokens",
        top_logprobs=(body.top_logprobs or 0) if wants_logprobs else None,
    )


def _output(text: TextConfig | None, ignored: IgnoredFields) -> OutputFormat | None:
    given = text.format if text is not None else None
    if given is None or given.get("type") == "text":
        return None
    for name in given.keys() - _FORMAT_FIELDS:
        ignored.add(path_of("text.format", name))
    if given.get("type") == "json_object":
        return OutputFormat("json_object", field="text.format")
    if given.get("type") != "json_schema":
        raise api_bounds.TEXT_FORMAT.refused()
    schema = given.get("schema")
    if not isinstance(schema, Mapping | bool):
        raise bounds.OUTPUT_SCHEMA.refused("text.format.schema")
    return OutputFormat("json_schema", schema, "text.format.schema")


def _note_hints(body: CreateResponseBody, ignored: IgnoredFields) -> None:
    if body.truncation not in (None, "disabled"):
        raise api_bounds.TRUNCATION.refused()
    for name in _HINTS:
        if getattr(body, name) is not None:
            ignored.add(name)
    if body.text is not None and body.text.verbosity is not None:
        ignored.add("text.verbosity")
    for index, name in enumerate(body.include or ()):
        if name != _LOGPROBS:
            ignored.add(f"include[{index}]")


def echo_of(draft: ResponseDraft, *, is_stored: bool) -> Json:
    """The fields of an answer that repeat its request, with OpenAI's defaults."""
    body = draft.body
    reasoning, text = body.reasoning or ResponseReasoning(), body.text or TextConfig()
    return {
        "background": draft.is_background,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary},
        "safety_identifier": body.safety_identifier,
        "service_tier": body.service_tier or "default",
        "store": is_stored,
        "temperature": body.temperature,
        "text": {"format": text.format or {"type": "text"}, "verbosity": text.verbosity or "medium"},
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": body.top_p,
        "truncation": "disabled",
        "user": body.user,
    }
