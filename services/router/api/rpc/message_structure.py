"""Measures how much of a protobuf message is structure, which costs far more than texts do. Pure.

The parser makes an object for each submessage: 8 MiB of empty ones, two bytes each, take a second.
"""

from __future__ import annotations

import functools

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from services.router.api.rpc.varint import read_varint

_TEXTS = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)


def structure_bytes(data: bytes, schema: Descriptor, *, at_most: int) -> int:
    """The bytes of `data` outside of texts and packed numbers, which both cost the parser little.

    Counting ends above `at_most`, or where the parser will fail.
    """
    position = n_text_bytes = 0
    open_messages = [(len(data), schema)]
    while position < len(data) and position - n_text_bytes <= at_most:
        while position >= open_messages[-1][0]:
            open_messages.pop()
        end, kind = open_messages[-1]
        try:
            tag, position = read_varint(data, position)
            wire_type = tag & 7
            if wire_type == 0:
                _, position = read_varint(data, position)
            elif wire_type in (1, 5):
                position += 8 if wire_type == 1 else 4
            elif wire_type == 2:
                size, position = read_varint(data, position)
                inner = _inner(kind).get(tag >> 3, True)  # the parser skips unknown fields
                if isinstance(inner, Descriptor):
                    open_messages.append((min(position + size, end), inner))
                    continue
                position += size
                n_text_bytes += size if inner else 0
        except (IndexError, ValueError):
            break
    return position - n_text_bytes


@functools.cache
def _inner(schema: Descriptor) -> dict[int, Descriptor | bool]:
    """By number: the schema of a submessage, or whether it is a text or a list of numbers."""
    return {
        field.number: field.message_type or field.type in _TEXTS or field.is_repeated
        for field in schema.fields
    }
