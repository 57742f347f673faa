"""JSON bodies of the OpenAI-shaped HTTP API -> `GenerationRequest`. Pure.

The structs list the fields of a body and the type of each; validation.py checks values. A null field counts
as left out. Fields that would change the answer and that Slipstream does not have are refused by name
(unsupported.py); other unknown fields are ignored and named (ignored_fields.py).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, ClassVar

import msgspec

from services.router.api.answers.answer_format import AnswerOptions
from services.router.api.json_body import (
    Flag,
    Json,
    Text,
    WholeNumber,
    decode_body,
    path_of,
)
from services.router.api.openai.ignored_fields import IgnoredFields
from services.router.api.openai.messages import (
    ChatMessage,
    parse_messages,
    parse_tool_choice,
    parse_tools,
    partial_field,
)
from services.router.api.openai.output_format import ResponseFormat, StructuredOutputs, parse_output
from services.router.api.openai.prompts import parse_prompts
from services.router.api.openai.sampling_body import SamplingBody, stated_numbers
from services.router.api.openai.thinking import (
    ReasoningOptions,
    TemplateOptions,
    ThinkingSwitches,
    parse_thinking,
)
from services.router.api.openai.unsupported import ANSWER_CHANGING, OF_CHAT_ONLY, TEXTS_ELSEWHERE
from services.router.request.choices import split_choices
from services.router.request.types import ChatInput, GenerationRequest, PromptInput, Sampling
from services.router.request.validation import is_session
from slipstream import bounds
from slipstream.bound import shown_name

_TOKEN_ID = re.compile(r"[0-9]{1,9}")
_SERVICE_TIERS: Mapping[str, str] = {
    "auto": "",
    "default": "default",
    "flex": "bulk",
    "priority": "interactive",
    "scale": "default",
}
# Fields that are taken and have no effect here.
_HINTS = ("store", "safety_identifier", "verbosity", "prediction", "prompt_cache_retention")
_hint_values: Callable[[_Body], tuple[object, ...]] = attrgetter(*_HINTS)

# ---- fields and their types


class _StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: Flag = None
    continuous_usage_stats: Flag = None
    include_obfuscation: Any = None


class _RunOptions(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    reject_if_busy: Flag = None


class _Body(SamplingBody, forbid_unknown_fields=True, gc=False):
    """The fields of both kinds of body."""

    model: Text = None
    user: Text = None
    request_id: Text = None
    service_tier: Text = None
    prompt_cache_key: Text = None
    stream: Flag = None
    stream_options: _StreamOptions | None = None
    ignore_eos: Flag = None
    prompt_logprobs: WholeNumber = None
    n: WholeNumber = None
    seed: WholeNumber = None
    max_tokens: WholeNumber = None
    max_completion_tokens: WholeNumber = None
    min_tokens: WholeNumber = None
    stop: Any = None
    stop_token_ids: list[Any] | None = None
    logit_bias: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    options: _RunOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Any = None
    guided_regex: Text = None
    guided_choice: Any = None
    guided_grammar: Text = None
    store: Any = None
    verbosity: Any = None
    prediction: Any = None
    safety_identifier: Any = None
    prompt_cache_retention: Any = None

    REFUSED: ClassVar[Mapping[str, tuple[object, ...]]] = {**ANSWER_CHANGING, **TEXTS_ELSEWHERE}


class _ChatBody(_Body):
    chat_template_kwargs: TemplateOptions | None = None
    thinking: Any = None
    enable_thinking: Flag = None
    reasoning: ReasoningOptions | None = None
    reasoning_effort: Text = None
    messages: list[ChatMessage] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: Flag = None
    add_generation_prompt: Flag = None
    continue_final_message: Flag = None
    logprobs: Flag = None
    top_logprobs: WholeNumber = None

    REFUSED: ClassVar = {**_Body.REFUSED, "best_of": (1,), "echo": (False,), "prompt": ("", [])}


class _CompletionBody(_Body):
    prompt: Any = None
    logprobs: WholeNumber = None
    echo: Flag = None

    REFUSED: ClassVar = {
        **_Body.REFUSED,
        "best_of": (1,),
        "suffix": ("",),
        **OF_CHAT_ONLY,
        "messages": (),
        "tools": ([],),
        "tool_choice": ("none", "auto"),
    }


BODIES: Mapping[str, type[msgspec.Struct]] = {
    "/v1/chat/completions": _ChatBody,
    "/v1/completions": _CompletionBody,
}
_CHAT_DECODER = msgspec.json.Decoder(_ChatBody)
_COMPLETION_DECODER = msgspec.json.Decoder(_CompletionBody)


class ResponseOptions(AnswerOptions, frozen=True, gc=False):
    """The options of OpenAI's answers.

    `echo_logprobs`: how many likely tokens the log probabilities of the echo name; None: it has none.
    `prompt_logprobs`: the same of vLLM's field.
    """

    include_usage: bool = False
    continuous_usage: bool = False
    echo: bool = False
    echo_logprobs: int | None = None
    prompt_logprobs: int | None = None


Parsed = tuple[Sequence[GenerationRequest], ResponseOptions]
Parser = Callable[[bytes, str], Parsed]

# ---- bodies


def parse_chat(data: bytes, request_id: str = "") -> Parsed:
    """A body of /v1/chat/completions: one request for each choice. `request_id` is the header's.

    The body's own id comes first. Raises InvalidArgument naming the first field that does not fit.
    """
    ignored = IgnoredFields()
    body = decode_body(data, _CHAT_DECODER, ignored.add)
    if body.messages is None:
        raise bounds.INPUT.refused()
    switches = ThinkingSwitches(
        body.chat_template_kwargs, body.thinking, body.enable_thinking, body.reasoning, body.reasoning_effort
    )
    thinking, keeps_reasoning = parse_thinking(switches, ignored.add)
    chat = ChatInput(
        messages=parse_messages(body.messages, ignored.add),
        tools=parse_tools(body.tools, ignored.add) if body.tools else (),
        tool_choice=parse_tool_choice(body.tool_choice, ignored.add),
        thinking=thinking,
        keeps_reasoning=keeps_reasoning,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        partial=partial_field(
            body.messages,
            continue_final_message=body.continue_final_message,
            add_generation_prompt=body.add_generation_prompt,
        ),
    )
    top_logprobs = body.top_logprobs
    if body.logprobs:
        top_logprobs = top_logprobs or 0
    elif top_logprobs:
        raise bounds.TOP_LOGPROBS_OFF.refused()
    else:
        top_logprobs = None
    sampling = _sampling(body, top_logprobs=top_logprobs, max_tokens=_max_tokens(body))
    request = _generation(body, chat, sampling, request_id, ignored)
    return split_choices(request, [chat], n=_choices(body)), _response_options(body, ignored)


def parse_completion(data: bytes, request_id: str = "") -> Parsed:
    """A body of /v1/completions: one request for each prompt and choice; otherwise as `parse_chat`."""
    ignored = IgnoredFields()
    body = decode_body(data, _COMPLETION_DECODER, ignored.add)
    if body.prompt is None:
        raise bounds.INPUT.refused("prompt")
    if body.logprobs is not None:
        bounds.TOP_LOGPROBS.check(body.logprobs, "logprobs")
    limit, field = _max_tokens(body)
    is_prompt_alone = limit == 0
    echo_logprobs = body.logprobs if body.echo else None
    prompts = parse_prompts(body.prompt)
    max_tokens = (1 if is_prompt_alone else limit, field)
    sampling = _sampling(body, top_logprobs=body.logprobs, max_tokens=max_tokens, echo_logprobs=echo_logprobs)
    request = _generation(body, prompts[0], sampling, request_id, ignored, is_prompt_alone=is_prompt_alone)
    requests = split_choices(request, prompts, n=_choices(body))
    return requests, _response_options(body, ignored, echo=body.echo is True, echo_logprobs=echo_logprobs)


def _choices(body: _Body) -> int:
    if body.n is None:
        return 1
    bounds.N.check(body.n)
    return body.n


def _max_tokens(body: _Body) -> tuple[int | None, str]:
    """The largest number of tokens to generate, and the field that states it: the newer name goes first."""
    if body.max_completion_tokens is None:
        return body.max_tokens, "max_tokens"
    return body.max_completion_tokens, "max_completion_tokens"


def _sampling(
    body: _Body,
    *,
    top_logprobs: int | None,
    max_tokens: tuple[int | None, str],
    echo_logprobs: int | None = None,
) -> Sampling:
    if body.prompt_logprobs is not None:
        bounds.PROMPT_LOGPROBS.check(body.prompt_logprobs)
    wanted = [top for top in (echo_logprobs, body.prompt_logprobs) if top is not None]
    return Sampling(
        given=stated_numbers(body),
        logit_bias=_logit_bias(body.logit_bias) if body.logit_bias else {},
        seed=body.seed,
        max_tokens=max_tokens[0],
        max_tokens_field=max_tokens[1],
        min_tokens=body.min_tokens or 0,
        stop_token_ids=_token_ids(body.stop_token_ids, "stop_token_ids") if body.stop_token_ids else (),
        top_logprobs=top_logprobs,
        prompt_logprobs=max(wanted, default=None),
        ignore_eos=body.ignore_eos is True,
    )


def _generation(
    body: _Body,
    source: ChatInput | PromptInput,
    sampling: Sampling,
    request_id: str,
    ignored: IgnoredFields,
    *,
    is_prompt_alone: bool = False,
) -> GenerationRequest:
    return GenerationRequest(
        input=source,
        model=body.model or "",
        sampling=sampling,
        stop=stop_strings(body.stop),
        output=parse_output(body, ignored.add),
        request_id=body.request_id or request_id,
        metadata=metadata_of(body.metadata) if body.metadata else {},
        priority=priority_of(body.service_tier) if body.service_tier else "",
        reject_if_busy=body.options is not None and body.options.reject_if_busy is True,
        is_prompt_alone=is_prompt_alone,
    )


def _response_options(
    body: _Body,
    ignored: IgnoredFields,
    *,
    echo: bool = False,
    echo_logprobs: int | None = None,
) -> ResponseOptions:
    options, stream = body.stream_options, body.stream is True
    for name, value in zip(_HINTS, _hint_values(body), strict=True):
        if value is not None:
            ignored.add(name)
    if options is not None and not stream:
        ignored.add("stream_options")
    with_usage = stream and options is not None
    continuous = with_usage and options is not None and options.continuous_usage_stats is True
    return ResponseOptions(
        stream,
        include_usage=with_usage and options is not None and (options.include_usage is True or continuous),
        continuous_usage=continuous,
        echo=echo,
        echo_logprobs=echo_logprobs,
        prompt_logprobs=body.prompt_logprobs,
        session=session_of(body.prompt_cache_key) if body.prompt_cache_key else None,
        ignored=ignored.header() if ignored.count else "",
        n_ignored=ignored.count,
    )


def session_of(key: str) -> str:
    """The session of a cache key. A key that no header could hold is named by its digest."""
    if is_session(key):
        return key
    return hashlib.blake2b(key.encode(errors="surrogatepass"), digest_size=16).hexdigest()


def _token_ids(given: Sequence[Any], path: str) -> tuple[int, ...]:
    for index, item in enumerate(given):
        if type(item) is not int:
            raise bounds.TYPE.refused(f"{path}[{index}]", expected="a token id")
    return tuple(given)


def _logit_bias(given: Json) -> Mapping[int, float]:
    biases: dict[int, float] = {}
    for key, bias in given.items():
        if not _TOKEN_ID.fullmatch(key):
            raise bounds.TYPE.refused(f"logit_bias.{shown_name(key)}", expected="a token id")
        if bias is not None and type(bias) not in (int, float):
            raise bounds.TYPE.refused(path_of("logit_bias", key), expected="a number")
        biases[int(key)] = bias or 0.0
    return biases


def metadata_of(given: Json) -> Mapping[str, str]:
    for key, text in given.items():
        if not isinstance(text, str | None):
            raise bounds.TYPE.refused(path_of("metadata", key), expected="a string")
    return {key: text or "" for key, text in given.items()}


def priority_of(tier: str) -> str:
    """The class of admission for one of OpenAI's service tiers."""
    if tier not in _SERVICE_TIERS:
        raise bounds.SERVICE_TIER.refused()
    return _SERVICE_TIERS[tier]


def stop_strings(value: object) -> Sequence[str]:
    """The stop strings; an empty one asks for nothing."""
    if value is None or value == "":
        return ()
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not all(isinstance(item, str | None) for item in value):
        raise bounds.TYPE.refused("stop", expected="a string or a list of strings")
    return [item for item in value if item]
