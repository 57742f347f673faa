"""Bodies of Workers AI's `run/{model}` -> bodies of chat completions. Pure.

A body is a run (`messages`, or `prompt`), a batch of runs (`requests`), or the question for the answer of one
that was queued (`request_id` alone). Values are copied as they stand: the parser of chat completions checks
them, so that a field means the same in both APIs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from libs.common import batch_bounds
from services.router.api.json_body import parse_object
from services.router.request.json_limits import check_structure
from slipstream import bounds
from slipstream.errors import InvalidArgument

Fields: TypeAlias = Mapping[str, msgspec.Raw]

_DECODER = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ITEMS_DECODER = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
# What msgspec raises for a raw field, whose text nothing has read before: no JSON of the type, or no UTF-8.
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError)
_NULL = b"null"
_EMPTY = (_NULL, b'""', b"[]")
_TRUE = b"true"
_NONE_EFFORT = msgspec.Raw(b'"none"')
# Inputs of other models of this API. An answer that passed over one would look like an answer to it.
_MEDIA = ("image", "image_b64", "audio", "video")
# Fields of this API alone, which the parser of chat completions would name as ignored.
_OWN = frozenset(
    {"prompt", "raw", "lora", "model", "queueRequest", "requests", "external_reference", *_MEDIA}
)


class LoraUnsupported(InvalidArgument):
    """The body names a LoRA adapter; no model here takes one."""

    http_status = 405


class RunBody(msgspec.Struct, frozen=True, gc=False):
    """One run. `chat`: the same as a body of chat completions.

    `is_native`: the body has a form older than OpenAI's (a prompt, or tools without `function`), and the
    answer has one too. `is_json`: it asks for JSON. `reference`: the client's name for the run in a batch.
    """

    chat: bytes
    is_native: bool = False
    is_json: bool = False
    is_streamed: bool = False
    reference: str | None = None


class BatchBody(msgspec.Struct, frozen=True, gc=False):
    """Several runs of one call."""

    runs: Sequence[RunBody]


class PollBody(msgspec.Struct, frozen=True, gc=False):
    """The question for the answer of a queued run or batch."""

    request_id: str


class ParsedRun(msgspec.Struct, frozen=True, gc=False):
    """What a body asks for, and whether to queue it. `ignored`: the fields without effect of its runs."""

    body: RunBody | BatchBody | PollBody
    is_queued: bool = False
    ignored: str = ""


def parse_run(data: bytes, model: str) -> ParsedRun:
    """The body of a run of `model`, which the path names. Raises InvalidArgument naming the field."""
    check_structure([("body", data)])
    fields = _fields(data)
    is_queued = _flag(fields, "queueRequest")
    if "requests" in fields:
        return ParsedRun(_batch(fields["requests"], model), is_queued)
    has_input = not _is_null(fields, "messages") or not _is_null(fields, "prompt")
    if not has_input and not _is_null(fields, "request_id"):
        return ParsedRun(PollBody(_text(fields, "request_id")))
    return ParsedRun(_run(fields, model), is_queued)


def _batch(given: msgspec.Raw, model: str) -> BatchBody:
    items = _items(given)
    batch_bounds.RUNS.check(len(items))
    runs = []
    for index, item in enumerate(items):
        try:
            run = _run(item, model)
        except InvalidArgument as error:
            raise type(error)(f"requests[{index}].{error.field}", error.reason) from None
        if run.is_streamed:
            raise batch_bounds.RUN_STREAM.refused(f"requests[{index}].stream")
        runs.append(run)
    return BatchBody(runs)


def _items(given: msgspec.Raw) -> Sequence[Fields]:
    try:
        return _ITEMS_DECODER.decode(given)
    except (*_UNREADABLE, RecursionError):
        pass
    # Names the bytes that are no UTF-8: the body's decoder passes over what a field holds.
    items: object = parse_object(b'{"requests":%s}' % bytes(given))["requests"]
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise bounds.TYPE.refused("requests", expected="a list of objects")
    return [_copied(item) for item in items]


def _run(fields: Fields, model: str) -> RunBody:
    if not _is_null(fields, "lora"):
        raise LoraUnsupported("lora", "is not supported by this model")
    if _flag(fields, "raw"):
        raise bounds.UNSUPPORTED.refused("raw")
    for name in _MEDIA:
        if bytes(fields.get(name, _NULL)) not in _EMPTY:
            raise bounds.UNSUPPORTED.refused(name)
    chat: dict[str, Any] = {name: value for name, value in fields.items() if name not in _OWN}
    chat["model"] = model
    is_native = "messages" not in fields or _is_null(fields, "messages")
    if is_native:
        chat["messages"] = [{"role": "user", "content": _prompt(fields)}]
    elif not _is_null(fields, "prompt"):
        raise batch_bounds.RUN_INPUT.refused()
    if bytes(fields.get("reasoning_effort", b"")) == _NULL:  # here null says: do not reason
        chat["reasoning_effort"] = _NONE_EFFORT
    tools = _nested_tools(fields["tools"]) if "tools" in fields else None
    if tools is not None:
        is_native = True
        chat["tools"] = tools
    reference = _text(fields, "external_reference") if not _is_null(fields, "external_reference") else None
    return RunBody(
        msgspec.json.encode(chat),
        is_native=is_native,
        is_json=_asks_for_json(fields),
        is_streamed=_flag(fields, "stream"),
        reference=reference,
    )


def _prompt(fields: Fields) -> msgspec.Raw:
    """The prompt as it stands in the body: reading 8 MiB of escapes twice takes long."""
    if _is_null(fields, "prompt"):
        raise batch_bounds.RUN_INPUT.refused()
    prompt = bytes(fields["prompt"])
    if not prompt.startswith(b'"'):
        raise bounds.TYPE.refused("prompt", expected="a string")
    if prompt == b'""':
        bounds.PROMPT.check(0)
    return fields["prompt"]


def _nested_tools(given: msgspec.Raw) -> Sequence[Any] | None:
    """The tools with `function`, where one has its name at the top; None if there is none to change."""
    try:
        tools = msgspec.json.decode(given)
    except _UNREADABLE:
        return None  # the parser of chat completions names the defect
    if not isinstance(tools, list) or len(tools) > bounds.MAX_TOOLS or not any(map(_is_flat, tools)):
        return None
    return [{"type": "function", "function": tool} if _is_flat(tool) else tool for tool in tools]


def _is_flat(tool: object) -> bool:
    return isinstance(tool, dict) and "name" in tool and "function" not in tool


def _asks_for_json(fields: Fields) -> bool:
    try:
        form = msgspec.json.decode(fields.get("response_format", _NULL))
    except _UNREADABLE:
        return False  # the parser of chat completions names the defect
    return isinstance(form, dict) and form.get("type") in ("json_object", "json_schema")


def _fields(data: bytes) -> Fields:
    try:
        return _DECODER.decode(data)
    except (*_UNREADABLE, RecursionError):
        pass
    # What msgspec refuses and the standard library reads, such as NaN, is refused by its field later.
    return _copied(parse_object(data))


def _copied(parsed: Mapping[str, Any]) -> Fields:
    return {name: msgspec.Raw(json.dumps(value).encode()) for name, value in parsed.items()}


def _is_null(fields: Fields, name: str) -> bool:
    return bytes(fields.get(name, _NULL)) == _NULL


def _flag(fields: Fields, name: str) -> bool:
    given = bytes(fields.get(name, _NULL))
    if given not in (_TRUE, b"false", _NULL):
        raise bounds.TYPE.refused(name, expected="true or false")
    return given == _TRUE


def _text(fields: Fields, name: str) -> str:
    try:
        return msgspec.json.decode(fields[name], type=str)
    except _UNREADABLE:
        raise bounds.TYPE.refused(name, expected="a string") from None
