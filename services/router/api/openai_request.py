"""JSON bodies of the OpenAI-shaped HTTP API -> `GenerationRequest`. Pure.

Only shapes and types are judged here, with the path of what is wrong; values are judged by
validate.py. A null field counts as left out. Unknown fields are refused by name; fields OpenAI has
and this project has not are refused as unsupported unless they hold their no-effect value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence

import msgspec

from services.router.api.json_fields import (
    ANY,
    ARRAY,
    BOOLEAN,
    INTEGER,
    NUMBER,
    OBJECT,
    TEXT,
    Json,
    NoEffect,
    Shape,
    check_kind,
    find_surrogate,
    nested,
    path_of,
    typed,
)
from services.router.api.openai_messages import is_plain, parse_message, parse_tool, parse_tool_choice
from services.router.request.types import ChatInput, GenerationRequest, PromptInput, Sampling
from slipstream import bounds
from slipstream.bound import shown_name
from slipstream.errors import InvalidArgument

_decode_json = json.JSONDecoder().decode
_TOKEN_ID = re.compile(r"\d{1,9}")
_SERVICE_TIERS: Mapping[str, str] = {
    "auto": "",
    "default": "default",
    "flex": "bulk",
    "priority": "interactive",
}

# ---- fields and what they hold

_COMMON: Shape = {
    **dict.fromkeys(("model", "user", "request_id", "service_tier"), TEXT),
    **dict.fromkeys(("stream", "ignore_eos"), BOOLEAN),
    **dict.fromkeys(("temperature", "top_p", "min_p"), NUMBER),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "repetition_penalty"), NUMBER),
    **dict.fromkeys(("n", "top_k", "seed", "max_tokens"), INTEGER),
    **dict.fromkeys(("stream_options", "logit_bias", "metadata", "options"), OBJECT),
    "stop": ANY,
}
_CHAT: Shape = {
    **_COMMON,
    **dict.fromkeys(("messages", "tools"), ARRAY),
    **dict.fromkeys(("parallel_tool_calls", "logprobs"), BOOLEAN),
    **dict.fromkeys(("max_completion_tokens", "top_logprobs"), INTEGER),
    **dict.fromkeys(("response_format", "chat_template_kwargs"), OBJECT),
    "tool_choice": ANY,
}
_COMPLETION: Shape = {**_COMMON, "prompt": TEXT, "logprobs": INTEGER}
_STREAM_OPTIONS: Shape = {"include_usage": BOOLEAN, "include_obfuscation": ANY}
_OPTIONS: Shape = {"rejectIfBusy": BOOLEAN}
_TEMPLATE: Shape = {"enable_thinking": BOOLEAN}
_RESPONSE_FORMAT: Shape = {"type": ANY, "json_schema": ANY}

# Fields of OpenAI's API without effect here, and the values that ask for nothing.
_NO_EFFECT: NoEffect = {
    "store": (False,),
    "modalities": (["text"],),
    "functions": (),
    "function_call": (),
    "prediction": (),
    "audio": (),
    "web_search_options": (),
    "reasoning_effort": (),
    "verbosity": (),
    "prompt_cache_key": (),
    "safety_identifier": (),
}
_COMPLETION_NO_EFFECT: NoEffect = {**_NO_EFFECT, "echo": (False,), "best_of": (1,), "suffix": ("",)}


class Envelope(msgspec.Struct, frozen=True, gc=False):
    """How the answer is to be sent; not part of what is generated."""

    stream: bool
    include_usage: bool


def parse_json(body: bytes) -> Json:
    """The body as an object of valid Unicode. Raises InvalidArgument naming the text that is not."""
    try:
        # Bytes that are no UTF-8 become lone surrogates here, as do lone \\ud800 escapes: both are
        # found afterwards, with the path of their field. A body without a backslash has no escapes; to look
        # for longer marks takes as long as to parse it.
        text = body.decode("utf-8", "surrogateescape")
        parsed = _decode_json(text)
        suspicious = b"\\" in body or not _is_utf8(text)
        where = find_surrogate(parsed) if suspicious else None
    except (ValueError, RecursionError) as error:
        raise bounds.BODY_FORMAT.refused() from error
    if where is not None:
        raise bounds.UTF8.refused(where or "body")
    if not isinstance(parsed, dict):
        raise bounds.BODY_FORMAT.refused()
    return parsed


def _is_utf8(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def parse_chat(body: Json, request_id: str = "") -> tuple[GenerationRequest, Envelope]:
    """A body of /v1/chat/completions. `request_id`: from the header, where the body has none."""
    given = typed(body, _CHAT, no_effect=_NO_EFFECT)
    response_format = nested(given, "response_format", _RESPONSE_FORMAT)
    if response_format is not None and response_format.get("type") != "text":
        raise bounds.RESPONSE_FORMAT.refused()
    template = nested(given, "chat_template_kwargs", _TEMPLATE)
    messages = given.get("messages")
    if messages is None:
        raise bounds.INPUT.refused()
    tools = given.get("tools")
    chat = ChatInput(
        messages=[
            item if is_plain(item) else parse_message(item, f"messages[{i}]")
            for i, item in enumerate(messages)
        ],
        tools=[parse_tool(item, f"tools[{i}]") for i, item in enumerate(tools)] if tools else (),
        tool_choice=parse_tool_choice(given.get("tool_choice")),
        thinking=template is not None and template.get("enable_thinking") is True,
        parallel_tool_calls=given.get("parallel_tool_calls") is not False,
    )
    top_logprobs = given.get("top_logprobs")
    if given.get("logprobs"):
        top_logprobs = top_logprobs or 0
    elif top_logprobs is not None:
        raise bounds.TOP_LOGPROBS_OFF.refused()
    newer, older = given.get("max_completion_tokens"), given.get("max_tokens")
    if newer is not None and older is not None and newer != older:
        raise InvalidArgument("max_completion_tokens", "differs from max_tokens; give one of them")
    name = "max_tokens" if newer is None else "max_completion_tokens"
    return _generation(given, chat, name, top_logprobs, request_id), _envelope(given)


def parse_completion(body: Json, request_id: str = "") -> tuple[GenerationRequest, Envelope]:
    """A body of /v1/completions. One text prompt; neither token ids nor several prompts."""
    given = typed(body, _COMPLETION, no_effect=_COMPLETION_NO_EFFECT)
    prompt = given.get("prompt")
    if prompt is None:
        raise bounds.INPUT.refused("prompt")
    logprobs = given.get("logprobs")
    if logprobs is not None:
        bounds.TOP_LOGPROBS.check(logprobs, "logprobs")
    generation = _generation(given, PromptInput(prompt), "max_tokens", logprobs, request_id)
    return generation, _envelope(given)


def _generation(
    given: Json,
    source: ChatInput | PromptInput,
    max_tokens_field: str,
    top_logprobs: int | None,
    request_id: str,
) -> GenerationRequest:
    field = given.get
    n = field("n")
    if n is not None:
        bounds.N.check(n)
    sampling = Sampling(
        temperature=field("temperature"),
        top_p=field("top_p"),
        top_k=field("top_k"),
        min_p=field("min_p"),
        presence_penalty=field("presence_penalty"),
        frequency_penalty=field("frequency_penalty"),
        repetition_penalty=field("repetition_penalty"),
        logit_bias=_logit_bias(field("logit_bias")),
        seed=field("seed"),
        max_tokens=field(max_tokens_field),
        max_tokens_field=max_tokens_field,
        top_logprobs=top_logprobs,
        ignore_eos=field("ignore_eos") is True,
    )
    return GenerationRequest(
        input=source,
        model=field("model") or "",
        sampling=sampling,
        stop=_stop(field("stop")),
        request_id=field("request_id") or request_id,
        metadata=_metadata(field("metadata")),
        priority=_priority(field("service_tier")),
        reject_if_busy=_reject_if_busy(given),
    )


def _envelope(given: Json) -> Envelope:
    options = nested(given, "stream_options", _STREAM_OPTIONS)
    stream = given.get("stream") is True
    if options is not None and not stream:
        raise InvalidArgument("stream_options", "is only for stream true")
    return Envelope(stream, options is not None and options.get("include_usage") is True)


def _logit_bias(given: Json | None) -> Mapping[int, float]:
    biases: dict[int, float] = {}
    for key, bias in given.items() if given else ():
        if not _TOKEN_ID.fullmatch(key):
            raise bounds.TYPE.refused(f"logit_bias.{shown_name(key)}", expected="a token id")
        check_kind(bias, NUMBER, path_of("logit_bias", key))
        biases[int(key)] = bias or 0.0
    return biases


def _metadata(given: Json | None) -> Mapping[str, str]:
    texts: dict[str, str] = {}
    for key, text in given.items() if given else ():
        check_kind(text, TEXT, path_of("metadata", key))
        texts[key] = text or ""
    return texts


def _priority(tier: str | None) -> str:
    """OpenAI's service tiers as classes of admission."""
    if not tier:
        return ""
    if tier not in _SERVICE_TIERS:
        raise bounds.UNSUPPORTED.refused("service_tier")
    return _SERVICE_TIERS[tier]


def _reject_if_busy(given: Json) -> bool:
    options = nested(given, "options", _OPTIONS)
    return options is not None and options.get("rejectIfBusy") is True


def _stop(value: object) -> Sequence[str]:
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise bounds.TYPE.refused("stop", expected="a string or a list of strings")
    return value


Parser = Callable[[Json, str], tuple[GenerationRequest, Envelope]]
