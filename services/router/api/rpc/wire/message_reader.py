"""Reads the bytes of a message within the bounds of its structure. Pure.

Errors name fields by their paths in the HTTP body.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

from google.protobuf import unknown_fields
from google.protobuf.message import DecodeError, Message

from services.router.api.rpc.wire.message_structure import measure_structure
from services.router.api.rpc.wire.utf8_check import find_invalid_text
from slipstream import bounds

MessageT = TypeVar("MessageT", bound=Message)

# Maps paths of the message to paths of the HTTP body where the two differ.
_BODY_PATHS = (
    (re.compile(r"^request\."), ""),
    (re.compile(r"(\.content)\[\d+\]\.text$"), r"\1"),
    (re.compile(r"^(chat|sampling)\."), ""),
    (re.compile(r"^token_ids\.ids$"), "prompt"),
    (re.compile(r"^(tools\[\d+\])\."), r"\1.function."),
    (re.compile(r"(\.tool_calls\[\d+\])\.(?=name|arguments)"), r"\1.function."),
    (re.compile(r"^tool_choice\.function$"), "tool_choice.function.name"),
)


def read_message(data: bytes, kind: type[MessageT]) -> MessageT:
    """The message in `data`. Raises InvalidArgument naming the field that has too much, or is not known."""
    if len(data) > bounds.MAX_BODY_BYTES:
        raise bounds.body_too_large()
    schema: Any = kind.DESCRIPTOR  # typed as two classes, one for each implementation
    most = bounds.MAX_STRUCTURE_BYTES
    if len(data) > most:  # no shorter message has too many numbers
        structure = measure_structure(data, schema, most_bytes=most, most_numbers=bounds.MAX_MESSAGE_NUMBERS)
        if structure.crowded is not None:
            raise bounds.NUMBERS.refused(_body_path(structure.crowded))
        if structure.n_bytes > most:
            raise bounds.BODY_STRUCTURE.refused()
    try:
        message = kind.FromString(data)
    except DecodeError:
        where = find_invalid_text(data, schema)
        if where is not None:
            raise bounds.UTF8.refused(_body_path(where)) from None
        raise bounds.BODY_FORMAT.refused() from None
    # A message without unknown fields encodes to its size again, unless its sender encoded it wastefully.
    # Then it has the size that it had before. Only another size is worth a walk. `ByteSize` encodes.
    message.DiscardUnknownFields()
    if (n_bytes := message.ByteSize()) != len(data) and kind.FromString(data).ByteSize() != n_bytes:
        unknown = _find_unknown(kind.FromString(data), "")
        if unknown is not None:
            raise bounds.UNKNOWN_FIELD.refused(_body_path(unknown))
    return message


def _find_unknown(message: Message, path: str) -> str | None:
    """The path of the first unknown field, whose last part is the field's number."""
    unknown = unknown_fields.UnknownFieldSet(message)
    if len(unknown):
        return f"{path}{unknown[0].field_number}"
    for field, value in message.ListFields():
        nested = field.message_type
        if nested is None or nested.GetOptions().map_entry:
            continue
        if field.is_repeated:
            items = [(f"{path}{field.name}[{index}].", item) for index, item in enumerate(value)]
        else:
            items = [(f"{path}{field.name}.", value)]
        for where, item in items:
            found = _find_unknown(item, where)
            if found is not None:
                return found
    return None


def _body_path(path: str) -> str:
    for pattern, replacement in _BODY_PATHS:
        path = pattern.sub(replacement, path)
    return path
