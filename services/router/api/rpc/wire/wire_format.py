"""Numbers of protobuf's wire format. Pure."""

from __future__ import annotations


def read_varint(data: bytes | memoryview, position: int) -> tuple[int, int]:
    """The integer at `position`, and the position behind it. Raises IndexError and ValueError."""
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            raise ValueError("varint too long")


def skip_number(data: bytes | memoryview, position: int, wire_type: int) -> int:
    """The position behind a number. Raises IndexError, and ValueError for another wire type."""
    if wire_type == 0:
        return read_varint(data, position)[1]
    if wire_type == 5:
        return position + 4
    if wire_type == 1:
        return position + 8
    raise ValueError(f"wire type {wire_type}")
