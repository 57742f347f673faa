"""Compares messages of conversations, in their rendered and in their raw form. Pure.

A message's key is its rendered form, which alone determines its token ids. Its raw form is the message of the
request. Equal raw messages have equal keys at any position, except for the reasoning; whether it was rendered
is recorded separately. Comparing raw messages needs no rendering.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from operator import not_
from typing import Any, cast

from libs.text.chat_template import Segment
from libs.text.special_tokens import IM_END

# (control, text) of each segment, concatenated.
MessageKey = tuple[bool | str, ...]
RawMessage = dict[str, Any]
# A dict key for a raw message of texts alone: fields with their texts, or with length and ends of long texts.
Label = tuple[str | tuple[int, str, str], ...]

# A message has no reasoning, or was rendered without it, or with it.
NO_REASONING, REASONING_DROPPED, REASONING_KEPT = 0, 1, 2

_MESSAGE_BYTES = 500  # objects around the texts
_TOKEN_BYTES = 9  # an id with spare capacity, and its share of the hash of a block of at least 16 tokens
_LABEL_CHARS = 128  # of longer texts only the ends are hashed
_LABEL_END_CHARS = 48
_SCALARS = (str, int, float, type(None))
_SIZED = (str, dict, list)


def split_messages(segments: Sequence[Segment]) -> list[MessageKey]:
    """Keys of rendered messages, each up to its end token."""
    messages: list[MessageKey] = []
    current: list[bool | str] = []
    for segment in segments:
        control, text = segment.control, segment.text
        current += (control, text)
        if control and text == IM_END:
            messages.append(tuple(current))
            current = []
    return messages


def chars_of(key: MessageKey) -> int:
    """The number of characters of a message's texts, without control tokens."""
    texts = cast("tuple[str, ...]", key[1::2])
    return sum(map(len, compress(texts, map(not_, key[::2]))))


def pieces_of(key: MessageKey) -> Iterable[tuple[bool, str]]:
    """(control, text) of each segment of a message."""
    values = iter(key)
    return cast("Iterable[tuple[bool, str]]", zip(values, values, strict=True))


def raw_of(message: Mapping[str, Any]) -> RawMessage | None:
    """A copy of a valid message for comparisons.

    None for a message that takes long to compare, or that equals messages of another form (1 == True).
    """
    for field, value in message.items():
        if type(value) is not str and not _is_plain(field, value):
            return None
    return dict(message)


def _is_plain(field: str, value: Any) -> bool:
    """Whether a field is a scalar, content parts of scalars, or function calls of scalars."""
    match field:
        case "content" if isinstance(value, list):
            return all(isinstance(part, dict) and _are_scalars(part) for part in value)
        case "tool_calls" if isinstance(value, list):
            return all(isinstance(call, dict) and _is_plain_call(call) for call in value)
        case _:
            return isinstance(value, _SCALARS)


def _is_plain_call(call: Mapping[str, Any]) -> bool:
    for value in call.values():
        if not isinstance(value, _SCALARS) and not (isinstance(value, dict) and _are_scalars(value)):
            return False
    return True


def _are_scalars(fields: Mapping[str, Any]) -> bool:
    return all(isinstance(value, _SCALARS) for value in fields.values())


def label_of(message: Mapping[str, Any]) -> Label | None:
    """The lookup key of a message of texts alone, without reasoning; None for other messages.

    Different messages may have the same label; a comparison of the raw messages decides.
    """
    label: list[str | tuple[int, str, str]] = []
    for field, value in message.items():
        if type(value) is not str or field == "reasoning_content":
            return None
        if len(value) > _LABEL_CHARS:
            label += (field, (len(value), value[:_LABEL_END_CHARS], value[-_LABEL_END_CHARS:]))
        else:
            label += (field, value)
    return tuple(label)


def reasoning_of(message: Mapping[str, Any], *, kept: bool) -> int:
    """How a message's reasoning is rendered. `kept`: the template keeps reasoning at this position."""
    if not message.get("reasoning_content"):
        return NO_REASONING
    return REASONING_KEPT if kept else REASONING_DROPPED


def message_bytes(key: MessageKey, raw: RawMessage | None, *, n_tokens: int) -> int:
    """The approximate memory of a cached message."""
    # Most texts are one object in the key and in the raw message; the text of a tool's result is not.
    sized: dict[int, Any] = {id(text): text for text in key[1::2]}
    values = [] if raw is None else [*raw.values()]
    for value in values:  # grows by what is in lists and dicts
        if type(value) in _SIZED:
            sized[id(value)] = value
            if type(value) is dict:
                values += value.values()
            elif type(value) is list:
                values += value
    return _MESSAGE_BYTES + _TOKEN_BYTES * n_tokens + sum(map(sys.getsizeof, sized.values()))
