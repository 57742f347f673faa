"""JSON bodies of the OpenAI-shaped HTTP API -> `GenerationRequest`. Pure.

The structs list the fields of a body and the type of each; validation.py checks values. A null field counts
as left out. Unknown fields are refused by name. Fields of OpenAI's API that have no effect here are refused
as unsupported unless they hold a value that asks for nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from services.router.api.json_body import (
    Flag,
    Json,
    NoEffect,
    Number,
    Text,
    WholeNumber,
    check_no_effect,
    decode_body,
    path_of,
)
from services.router.api.openai.messages import ChatMessage, parse_messages, parse_tool_choice, parse_tools
from services.router.request.types import ChatInput, GenerationRequest, PromptInput, Sampling
from slipstream import bounds
from slipstream.bound import shown_name
from slipstream.errors import InvalidArgument
from slipstream.sampling import SAMPLING_RANGES

_TOKEN_ID = re.compile(r"[0-9]{1,9}")
_SERVICE_TIERS: Mapping[str, str] = {
    "auto": "",
    "default": "default",
    "flex": "bulk",
    "priority": "interactive",
}

# ---- fields and their types

if TYPE_CHECKING:

    class _SamplingBody(msgspec.Struct):
        """One field for each of SAMPLING_RANGES."""
else:
    _SamplingBody = msgspec.defstruct(
        "_SamplingBody",
        [(name, WholeNumber if row.whole else Number, None) for name, row in SAMPLING_RANGES.items()],
    )
_sampling_values: Callable[[_SamplingBody], tuple[float | None, ...]] = attrgetter(*SAMPLING_RANGES)


class _StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: Flag = None
    include_obfuscation: Any = None


class _Options(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    reject_if_busy: Flag = None


class _ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: Any = None
    json_schema: Any = None


class _TemplateOptions(msgspec.Struct, forbid_unknown_fields=True):
    enable_thinking: Flag = None


class _Body(_SamplingBody, forbid_unknown_fields=True, gc=False):
    """The fields of both kinds of body."""

    model: Text = None
    user: Text = None
    request_id: Text = None
    service_tier: Text = None
    stream: Flag = None
    stream_options: _StreamOptions | None = None
    ignore_eos: Flag = None
    n: WholeNumber = None
    seed: WholeNumber = None
    max_tokens: WholeNumber = None
    stop: Any = None
    logit_bias: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    options: _Options | None = None
    store: Any = None
    modalities: Any = None
    functions: NoEffect = None
    function_call: NoEffect = None
    prediction: NoEffect = None
    audio: NoEffect = None
    web_search_options: NoEffect = None
    reasoning_effort: NoEffect = None
    verbosity: NoEffect = None
    prompt_cache_key: NoEffect = None
    safety_identifier: NoEffect = None

    NO_EFFECT: ClassVar[Mapping[str, tuple[object, ...]]] = {"store": (False,), "modalities": (["text"],)}


class _ChatBody(_Body):
    response_format: _ResponseFormat | None = None
    chat_template_kwargs: _TemplateOptions | None = None
    messages: list[ChatMessage] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: Flag = None
    logprobs: Flag = None
    top_logprobs: WholeNumber = None
    max_completion_tokens: WholeNumber = None


class _CompletionBody(_Body):
    prompt: Text = None
    logprobs: WholeNumber = None
    echo: Any = None
    best_of: Any = None
    suffix: Any = None

    NO_EFFECT: ClassVar = {**_Body.NO_EFFECT, "echo": (False,), "best_of": (1,), "suffix": ("",)}


_CHAT_DECODER = msgspec.json.Decoder(_ChatBody)
_COMPLETION_DECODER = msgspec.json.Decoder(_CompletionBody)


class ResponseOptions(msgspec.Struct, frozen=True, gc=False):
    """How the client wants the response; the options change nothing in what is generated."""

    stream: bool
    include_usage: bool


Parser = Callable[[bytes, str], tuple[GenerationRequest, ResponseOptions]]

# ---- bodies


def parse_chat(data: bytes, request_id: str = "") -> tuple[GenerationRequest, ResponseOptions]:
    """A body of /v1/chat/completions. `request_id` is the header's; the body's own comes first.

    Raises InvalidArgument naming the first field that does not fit.
    """
    body = decode_body(data, _CHAT_DECODER)
    _check_no_effect(body)
    if body.response_format is not None and body.response_format.type != "text":
        raise bounds.RESPONSE_FORMAT.refused()
    if body.messages is None:
        raise bounds.INPUT.refused()
    template = body.chat_template_kwargs
    chat = ChatInput(
        messages=parse_messages(body.messages),
        tools=parse_tools(body.tools) if body.tools else (),
        tool_choice=parse_tool_choice(body.tool_choice),
        thinking=template is not None and template.enable_thinking is True,
        parallel_tool_calls=body.parallel_tool_calls is not False,
    )
    top_logprobs = body.top_logprobs
    if body.logprobs:
        top_logprobs = top_logprobs or 0
    elif top_logprobs is not None:
        raise bounds.TOP_LOGPROBS_OFF.refused()
    max_tokens, max_tokens_field = body.max_tokens, "max_tokens"
    if body.max_completion_tokens is not None:
        if max_tokens not in (None, body.max_completion_tokens):
            raise InvalidArgument("max_completion_tokens", "differs from max_tokens; give one of them")
        max_tokens, max_tokens_field = body.max_completion_tokens, "max_completion_tokens"
    sampling = _sampling(
        body, max_tokens=max_tokens, max_tokens_field=max_tokens_field, top_logprobs=top_logprobs
    )
    return _generation(body, chat, sampling, request_id), _response_options(body)


def parse_completion(data: bytes, request_id: str = "") -> tuple[GenerationRequest, ResponseOptions]:
    """A body of /v1/completions with one text prompt; otherwise as `parse_chat`."""
    body = decode_body(data, _COMPLETION_DECODER)
    _check_no_effect(body)
    if body.prompt is None:
        raise bounds.INPUT.refused("prompt")
    if body.logprobs is not None:
        bounds.TOP_LOGPROBS.check(body.logprobs, "logprobs")
    sampling = _sampling(
        body, max_tokens=body.max_tokens, max_tokens_field="max_tokens", top_logprobs=body.logprobs
    )
    return _generation(body, PromptInput(body.prompt), sampling, request_id), _response_options(body)


def _check_no_effect(body: _Body) -> None:
    for name, allowed in body.NO_EFFECT.items():
        check_no_effect(name, getattr(body, name), allowed)


def _sampling(
    body: _Body, *, max_tokens: int | None, max_tokens_field: str, top_logprobs: int | None
) -> Sampling:
    if body.n is not None:
        bounds.N.check(body.n)
    given = zip(SAMPLING_RANGES, _sampling_values(body), strict=True)
    return Sampling(
        given={name: value for name, value in given if value is not None},
        logit_bias=_logit_bias(body.logit_bias) if body.logit_bias else {},
        seed=body.seed,
        max_tokens=max_tokens,
        max_tokens_field=max_tokens_field,
        top_logprobs=top_logprobs,
        ignore_eos=body.ignore_eos is True,
    )


def _generation(
    body: _Body, source: ChatInput | PromptInput, sampling: Sampling, request_id: str
) -> GenerationRequest:
    return GenerationRequest(
        input=source,
        model=body.model or "",
        sampling=sampling,
        stop=_stop(body.stop),
        request_id=body.request_id or request_id,
        metadata=_metadata(body.metadata) if body.metadata else {},
        priority=_priority(body.service_tier) if body.service_tier else "",
        reject_if_busy=body.options is not None and body.options.reject_if_busy is True,
    )


def _response_options(body: _Body) -> ResponseOptions:
    options, stream = body.stream_options, body.stream is True
    if options is not None and not stream:
        raise InvalidArgument("stream_options", "is only for stream true")
    return ResponseOptions(stream, options is not None and options.include_usage is True)


def _logit_bias(given: Json) -> Mapping[int, float]:
    biases: dict[int, float] = {}
    for key, bias in given.items():
        if not _TOKEN_ID.fullmatch(key):
            raise bounds.TYPE.refused(f"logit_bias.{shown_name(key)}", expected="a token id")
        if bias is not None and type(bias) not in (int, float):
            raise bounds.TYPE.refused(path_of("logit_bias", key), expected="a number")
        biases[int(key)] = bias or 0.0
    return biases


def _metadata(given: Json) -> Mapping[str, str]:
    for key, text in given.items():
        if not isinstance(text, str | None):
            raise bounds.TYPE.refused(path_of("metadata", key), expected="a string")
    return {key: text or "" for key, text in given.items()}


def _priority(tier: str) -> str:
    """The class of admission for one of OpenAI's service tiers."""
    if tier not in _SERVICE_TIERS:
        raise bounds.UNSUPPORTED.refused("service_tier")
    return _SERVICE_TIERS[tier]


def _stop(value: object) -> Sequence[str]:
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise bounds.TYPE.refused("stop", expected="a string or a list of strings")
    return value
