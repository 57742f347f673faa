"""JSON bodies of the OpenAI-shaped HTTP API -> `Generation`. Pure.

Only shapes and types are judged here, with the path of what is wrong; values are judged by
validate.py. A null field counts as left out. Unknown fields are refused by name; fields OpenAI has
and this project has not are refused as unsupported unless they hold their no-effect value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from libs.common import bounds
from libs.common.bound import shown_name
from libs.common.errors import InvalidArgument
from services.router.json_fields import Fields, find_surrogate
from services.router.request import ChatInput, Generation, PromptInput, Sampling, ToolChoice

Json = Mapping[str, Any]

_TOKEN_ID = re.compile(r"\d{1,9}")
# Fields of OpenAI's API without effect here, and the values that ask for nothing.
_NO_EFFECT: Mapping[str, tuple[object, ...]] = {
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
_TIERS: Mapping[str, str] = {"auto": "", "default": "default", "flex": "bulk", "priority": "interactive"}
# Fields of `Sampling` that are read as they are.
_SAMPLING: Mapping[str, Callable[[Fields, str], Any]] = {
    "temperature": Fields.number,
    "top_p": Fields.number,
    "min_p": Fields.number,
    "presence_penalty": Fields.number,
    "frequency_penalty": Fields.number,
    "repetition_penalty": Fields.number,
    "top_k": Fields.integer,
    "seed": Fields.integer,
}
_COMMON = (
    *("model", "stream", "stream_options", "n", "stop", "logit_bias", "ignore_eos"),
    *("user", "metadata", "max_tokens", "logprobs", "request_id", "service_tier", "options"),
    *_SAMPLING,
)
_CHAT = frozenset(
    (
        *_COMMON,
        *("messages", "tools", "tool_choice", "parallel_tool_calls", "max_completion_tokens"),
        *("top_logprobs", "response_format", "chat_template_kwargs"),
    )
)
_COMPLETION = frozenset((*_COMMON, "prompt", "echo", "best_of", "suffix"))
_COMPLETION_NO_EFFECT = {**_NO_EFFECT, "echo": (False,), "best_of": (1,), "suffix": ("",)}
_MESSAGE = frozenset(("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"))
_MESSAGE_NO_EFFECT: Mapping[str, tuple[object, ...]] = {
    **{name: () for name in ("refusal", "audio", "function_call")},
    "annotations": ([],),
}


@dataclass(frozen=True, slots=True)
class Envelope:
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
        parsed = json.loads(text)
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


def parse_chat(body: Json, request_id: str = "") -> tuple[Generation, Envelope]:
    """A body of /v1/chat/completions. `request_id`: from the header, where the body has none."""
    fields = Fields(body, known=_CHAT, no_effect=_NO_EFFECT)
    response_format = fields.object("response_format", known=("type", "json_schema"))
    if response_format is not None and response_format.get("type") != "text":
        raise bounds.RESPONSE_FORMAT.refused()
    template = fields.object("chat_template_kwargs", known=("enable_thinking",))
    messages = fields.array("messages")
    if messages is None:
        raise bounds.INPUT.refused()
    chat = ChatInput(
        messages=[
            item if _is_plain(item) else _message(item, f"messages[{i}]") for i, item in enumerate(messages)
        ],
        tools=[_tool(item, f"tools[{i}]") for i, item in enumerate(fields.array("tools") or ())],
        tool_choice=_tool_choice(body.get("tool_choice")),
        thinking=bool(template and template.boolean("enable_thinking")),
        parallel_tool_calls=fields.boolean("parallel_tool_calls") is not False,
    )
    top_logprobs = fields.integer("top_logprobs")
    if fields.boolean("logprobs"):
        top_logprobs = top_logprobs or 0
    elif top_logprobs is not None:
        raise bounds.TOP_LOGPROBS_OFF.refused()
    newer = fields.integer("max_completion_tokens")
    older = fields.integer("max_tokens")
    if newer is not None and older is not None and newer != older:
        raise InvalidArgument("max_completion_tokens", "differs from max_tokens; give one of them")
    name = "max_tokens" if newer is None else "max_completion_tokens"
    generation = _generation(fields, chat, name, top_logprobs, request_id)
    return generation, _envelope(fields)


def parse_completion(body: Json, request_id: str = "") -> tuple[Generation, Envelope]:
    """A body of /v1/completions. One text prompt; neither token ids nor several prompts."""
    fields = Fields(body, known=_COMPLETION, no_effect=_COMPLETION_NO_EFFECT)
    prompt = fields.text("prompt")
    if prompt is None:
        raise bounds.INPUT.refused("prompt")
    logprobs = fields.integer("logprobs")
    if logprobs is not None:
        bounds.TOP_LOGPROBS.check(logprobs, "logprobs")
    generation = _generation(fields, PromptInput(prompt), "max_tokens", logprobs, request_id)
    return generation, _envelope(fields)


def _generation(
    fields: Fields,
    source: ChatInput | PromptInput,
    max_tokens_field: str,
    top_logprobs: int | None,
    request_id: str,
) -> Generation:
    n = fields.integer("n")
    if n is not None:
        bounds.N.check(n)
    fields.text("user")
    return Generation(
        input=source,
        model=fields.text("model") or "",
        sampling=Sampling(
            **{name: read(fields, name) for name, read in _SAMPLING.items() if name in fields.names()},
            logit_bias=_logit_bias(fields),
            max_tokens=fields.integer(max_tokens_field),
            max_tokens_field=max_tokens_field,
            top_logprobs=top_logprobs,
            ignore_eos=bool(fields.boolean("ignore_eos")),
        ),
        stop=_stop(fields.get("stop")),
        request_id=fields.text("request_id") or request_id,
        metadata=_metadata(fields),
        priority=_priority(fields),
        reject_if_busy=_reject_if_busy(fields),
    )


def _envelope(fields: Fields) -> Envelope:
    options = fields.object("stream_options", known=("include_usage", "include_obfuscation"))
    stream = bool(fields.boolean("stream"))
    if options is not None and not stream:
        raise InvalidArgument("stream_options", "is only for stream true")
    return Envelope(stream, bool(options and options.boolean("include_usage")))


def _logit_bias(fields: Fields) -> Mapping[int, float]:
    given = fields.object("logit_bias", known=None)
    biases: dict[int, float] = {}
    for key in given.names() if given is not None else ():
        if given is None or not _TOKEN_ID.fullmatch(key):
            raise bounds.TYPE.refused(f"logit_bias.{shown_name(key)}", expected="a token id")
        biases[int(key)] = given.number(key) or 0.0
    return biases


def _metadata(fields: Fields) -> Mapping[str, str]:
    given = fields.object("metadata", known=None)
    return {key: given.text(key) or "" for key in given.names()} if given is not None else {}


def _priority(fields: Fields) -> str:
    """OpenAI's service tiers as classes of admission."""
    tier = fields.text("service_tier") or "auto"
    if tier not in _TIERS:
        raise bounds.UNSUPPORTED.refused("service_tier")
    return _TIERS[tier]


def _reject_if_busy(fields: Fields) -> bool:
    options = fields.object("options", known=("rejectIfBusy",))
    return bool(options is not None and options.boolean("rejectIfBusy"))


def _stop(value: object) -> Sequence[str]:
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise bounds.TYPE.refused("stop", expected="a string or a list of strings")
    return value


def _is_plain(item: object) -> bool:
    """A role and a text and nothing else, as most messages of a long conversation are."""
    return (
        type(item) is dict
        and len(item) == 2
        and type(item.get("role")) is str
        and type(item.get("content")) is str
    )


def _message(item: object, path: str) -> Json:
    fields = Fields.of(item, path, known=_MESSAGE, no_effect=_MESSAGE_NO_EFFECT)
    message: dict[str, Any] = {"role": fields.text("role"), "content": _content(fields)}
    for name in ("name", "tool_call_id", "reasoning_content"):
        message[name] = fields.text(name)
    calls = fields.array("tool_calls") or ()
    message["tool_calls"] = [_tool_call(call, f"{path}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return {name: value for name, value in message.items() if value not in (None, [])}


def _content(fields: Fields) -> str | None:
    """Content as one text: parts of type text are joined; others are refused."""
    content = fields.get("content")
    if content is None or isinstance(content, str):
        return content
    path = fields.path_of("content")
    if not isinstance(content, list):
        raise bounds.TYPE.refused(path, expected="a string or a list of parts")
    texts: list[str] = []
    for index, item in enumerate(content):
        part = Fields.of(item, f"{path}[{index}]", known=None)
        if part.text("type") != "text":
            raise InvalidArgument(part.path_of("type"), "must be text: other parts are not supported")
        texts.append(part.text("text") or "")
    return "".join(texts)


def _tool_call(item: object, path: str) -> Json:
    fields = Fields.of(item, path, known=("id", "type", "function", "index"))
    if fields.text("type") not in (None, "function"):
        raise InvalidArgument(f"{path}.type", "must be function")
    function = fields.object("function", known=("name", "arguments"))
    if function is None:
        raise bounds.TYPE.refused(f"{path}.function", expected="an object")
    return {
        "id": fields.text("id") or "",
        "type": "function",
        "function": {"name": function.text("name") or "", "arguments": function.text("arguments") or ""},
    }


def _tool(item: object, path: str) -> Json:
    """Unknown keys are refused here; everything else about tools is judged by libs.text."""
    if isinstance(item, dict):
        fields = Fields(item, known=("type", "function"), path=path)
        if isinstance(fields.get("function"), dict):
            fields.object("function", known=("name", "description", "parameters", "strict"))
    checked: Json = item  # type: ignore[assignment]
    return checked


def _tool_choice(value: object) -> ToolChoice | None:
    if value is None:
        return None
    if isinstance(value, str) and value in ("none", "auto", "required"):
        return ToolChoice(value)  # type: ignore[arg-type]
    if not isinstance(value, dict) or value.get("type") != "function":
        raise bounds.TOOL_CHOICE.refused()
    function = Fields(value, known=("type", "function"), path="tool_choice").object(
        "function", known=("name",)
    )
    name = function.text("name") if function is not None else None
    return ToolChoice("function", name or "")


Parser = Callable[[Json, str], tuple[Generation, Envelope]]
