"""How messages of conversations are told apart: by how they are rendered, and as requests have them. Pure.

A message's key is what it is rendered as; its ids hang on nothing else. Its name is the message as a request
had it, where an equal one is rendered to the same key wherever it stands, but for its reasoning, of which it
is known besides whether it was kept. Names are compared without rendering anything.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import compress
from operator import not_
from typing import Any, cast

from libs.text.chat_template import Segment
from libs.text.special_tokens import IM_END

# (control, text) of each of its segments in a row.
MessageKey = tuple[bool | str, ...]
Name = dict[str, Any]
# A name that is nothing but texts, as a key of dicts: fields with texts, of long ones their sizes and ends.
Label = tuple[str | tuple[int, str, str], ...]

# A message's reasoning: it has none, or it was rendered without it, or with it.
NO_REASONING, LEFT_OUT, KEPT = 0, 1, 2

_MESSAGE_BYTES = 500  # objects around the texts
_TOKEN_BYTES = 9  # an id, with room to grow, and its share of a block's hash: a block has 16 tokens at least
_LABEL_CHARS = 128  # texts longer than this are not hashed whole
_LABEL_END_CHARS = 48
_SCALARS = (str, int, float, type(None))
_SIZED = (str, dict, list)


def split_messages(segments: Sequence[Segment]) -> list[MessageKey]:
    """The keys of rendered messages, each up to its end token."""
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
    """Characters of its texts, control tokens aside."""
    texts = cast("tuple[str, ...]", key[1::2])
    return sum(map(len, compress(texts, map(not_, key[::2]))))


def pieces_of(key: MessageKey) -> Iterable[tuple[bool, str]]:
    """(control, text) of each segment."""
    values = iter(key)
    return cast("Iterable[tuple[bool, str]]", zip(values, values, strict=True))


def name_of(message: Mapping[str, Any]) -> Name | None:
    """A name of its own for a message that could be rendered; None where equal ones may be rendered
    differently (1 and True are equal) or that would take long to compare."""
    for field, value in message.items():
        if type(value) is not str and not _is_plain(field, value):
            return None
    return dict(message)


def _is_plain(field: str, value: Any) -> bool:
    """Texts, or nothing deeper than parts of a content and calls of functions with written arguments."""
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
    """What a message of plain texts that is rendered alike wherever it stands is looked up by. Others may
    have the same: their names tell."""
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
    """`kept`: whether it would be rendered with what it has of it."""
    if not message.get("reasoning_content"):
        return NO_REASONING
    return KEPT if kept else LEFT_OUT


def message_bytes(key: MessageKey, name: Name | None, *, n_tokens: int) -> int:
    """What it takes to keep a message, about."""
    said = [] if name is None else [*name.values()]
    if list in map(type, said):
        said = [*_objects(said)]
    # Most texts are the same object in the key and in the name; that of a tool's result is not.
    kept = {id(value): value for value in (*key[1::2], *said) if type(value) in _SIZED}
    return _MESSAGE_BYTES + _TOKEN_BYTES * n_tokens + sum(map(sys.getsizeof, kept.values()))


def _objects(value: Any) -> Iterator[Any]:
    """Lists and dicts, and what is in them."""
    yield value
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list):
        return
    for each in value:
        yield from _objects(each)
