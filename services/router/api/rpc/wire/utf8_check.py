"""Finds the string field of a protobuf message that is not valid UTF-8. Pure.

The error of the protobuf parser does not name the field.
"""

from __future__ import annotations

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from services.router.api.rpc.wire.wire_format import read_varint, skip_number

_MAX_DEPTH = 32


def find_invalid_text(data: bytes, schema: Descriptor) -> str | None:
    """The path of the first string in `data` that is not UTF-8; None: no such string, or malformed data."""
    try:
        return _find(memoryview(data), schema, "", _MAX_DEPTH)
    except (IndexError, ValueError):
        return None


def _find(data: memoryview, schema: Descriptor, path: str, depth: int) -> str | None:
    if depth == 0:
        raise ValueError("nested too deeply")
    seen: dict[int, int] = {}
    position = 0
    while position < len(data):
        tag, position = read_varint(data, position)
        number, wire_type = tag >> 3, tag & 7
        if wire_type == 2:
            size, start = read_varint(data, position)
            position = start + size
            if position > len(data):
                raise ValueError("cut short")
            field = schema.fields_by_number.get(number)
            if field is None:
                continue
            index = seen[number] = seen.get(number, -1) + 1
            where = f"{path}{field.name}"
            is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
            if field.is_repeated and not is_map:
                where += f"[{index}]"
            found = _in_field(data[start:position], field, where, is_map, depth)
            if found is not None:
                return found
        else:
            position = skip_number(data, position, wire_type)
    return None


def _in_field(data: memoryview, field: FieldDescriptor, where: str, is_map: bool, depth: int) -> str | None:
    if field.type == FieldDescriptor.TYPE_STRING:
        try:
            str(data, "utf-8")
        except UnicodeDecodeError:
            return where
    elif field.type == FieldDescriptor.TYPE_MESSAGE and field.message_type is not None:
        found = _find(data, field.message_type, f"{where}.", depth - 1)
        return where if found is not None and is_map else found
    return None
