"""Measures how much of a protobuf message is structure, which costs far more than texts do. Pure.

The parser makes an object for each submessage: 8 MiB of empty ones, two bytes each, take a second. It reads a
packed number in 15 ns, and keeps the interpreter's lock meanwhile: 130 ms for 8 million of one byte.
"""

from __future__ import annotations

import functools
from collections.abc import Container
from typing import NamedTuple

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from services.router.api.rpc.wire.wire_format import read_varint, skip_number

_TEXTS = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
_FIXED_BYTES = {
    **dict.fromkeys((FieldDescriptor.TYPE_FIXED32, FieldDescriptor.TYPE_SFIXED32), 4),
    **dict.fromkeys((FieldDescriptor.TYPE_FIXED64, FieldDescriptor.TYPE_SFIXED64), 8),
    FieldDescriptor.TYPE_FLOAT: 4,
    FieldDescriptor.TYPE_DOUBLE: 8,
}
# The tags around a group's fields, which have no value.
_GROUP = (3, 4)
# The last byte of a varint is below 128.
_NOT_LAST = bytes(range(128, 256))
# A piece is so short that it keeps the interpreter's lock for less than a millisecond.
_PIECE_BYTES = 256 << 10
# A message up to the first of these sizes, with up to the second beside its prose, is read in 0.1 to 0.5 ms.
_PROSE_BYTES, _BESIDE_PROSE_BYTES = 256 << 10, 1 << 10
# The strings that no parser reads: others are JSON.
_PROSE = frozenset({"text", "prompt", "reasoning_content"})


class MessageStructure(NamedTuple):
    """`n_bytes` are outside of texts and packed numbers; `crowded` is a field with too many of these."""

    n_bytes: int
    crowded: str | None


class _Opened(NamedTuple):
    end: int
    schema: Descriptor
    path: str


def is_mostly_prose(data: bytes, schema: Descriptor) -> bool:
    """Whether a message is read in 0.1 to 0.5 ms: nearly all of it is text of the conversation."""
    if len(data) > _PROSE_BYTES:
        return False
    found = measure_structure(data, schema, most_bytes=_BESIDE_PROSE_BYTES, most_numbers=0, texts=_PROSE)
    return found.crowded is None and found.n_bytes <= _BESIDE_PROSE_BYTES


def measure_structure(
    data: bytes,
    schema: Descriptor,
    *,
    most_bytes: int,
    most_numbers: int,
    texts: Container[str] | None = None,
) -> MessageStructure:
    """Measure `data` before it is parsed. Measuring ends above a bound, or where the parser will fail.

    The packed numbers of all fields count together. With `texts`, other strings than these are structure.
    """
    position = n_text_bytes = n_numbers = 0
    opened = [_Opened(len(data), schema, "")]
    while position < len(data) and position - n_text_bytes <= most_bytes:
        while position >= opened[-1].end:
            opened.pop()
        inside = opened[-1]
        try:
            tag, position = read_varint(data, position)
            wire_type = tag & 7
            if wire_type == 2:
                size, position = read_varint(data, position)
                field = _fields(inside.schema).get(tag >> 3)
                if field is not None and field.message_type is not None:
                    end = min(position + size, inside.end)
                    opened.append(_Opened(end, field.message_type, f"{inside.path}{field.name}."))
                    continue
                start, position = position, position + size
                if field is None:  # the parser skips unknown fields
                    n_text_bytes += size
                elif field.type in _TEXTS:
                    n_text_bytes += size if texts is None or field.name in texts else 0
                elif field.is_repeated:
                    n_text_bytes += size
                    n_numbers += _count(data, start, position, field, at_most=most_numbers - n_numbers)
                    if n_numbers > most_numbers:
                        return MessageStructure(position - n_text_bytes, f"{inside.path}{field.name}")
            elif wire_type not in _GROUP:
                position = skip_number(data, position, wire_type)
        except (IndexError, ValueError):
            break
    return MessageStructure(position - n_text_bytes, None)


def _count(data: bytes, start: int, end: int, field: FieldDescriptor, *, at_most: int) -> int:
    """The packed numbers between two positions. Counting ends with the first piece above `at_most`."""
    end = min(end, len(data))
    if field.type in _FIXED_BYTES:
        return (end - start) // _FIXED_BYTES[field.type]
    count = 0
    for begin in range(start, end, _PIECE_BYTES):
        count += len(data[begin : min(begin + _PIECE_BYTES, end)].translate(None, _NOT_LAST))
        if count > at_most:
            break
    return count


@functools.cache
def _fields(schema: Descriptor) -> dict[int, FieldDescriptor]:
    return {field.number: field for field in schema.fields}
