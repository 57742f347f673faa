"""read_varint and skip_number of protobuf's wire format, and both walks that use them."""

from __future__ import annotations

import struct

import pytest
from google.protobuf.internal.encoder import _VarintBytes  # type: ignore[attr-defined]
from hypothesis import given
from hypothesis import strategies as st

from services.router.api.rpc.wire.message_structure import measure_structure
from services.router.api.rpc.wire.utf8_check import find_invalid_text
from services.router.api.rpc.wire.wire_format import read_varint, skip_number
from slipstream.v1 import router_pb2

SCHEMA = router_pb2.GenerateRequest.DESCRIPTOR
STOP = SCHEMA.fields_by_name["stop"].number << 3 | 2


@given(value=st.integers(0, 2**64 - 1), before=st.binary(max_size=5), after=st.binary(max_size=5))
def test_a_number_is_read_and_skipped_alike(value: int, before: bytes, after: bytes) -> None:
    data = before + _VarintBytes(value) + after
    end = len(data) - len(after)
    assert read_varint(data, len(before)) == (value, end)
    assert skip_number(memoryview(data), len(before), 0) == end


@given(value=st.floats(width=32, allow_nan=False), at=st.integers(0, 9))
def test_a_fixed_number_has_the_size_of_its_wire_type(value: float, at: int) -> None:
    assert skip_number(struct.pack("<f", value), at, 5) == at + len(struct.pack("<f", value))
    assert skip_number(struct.pack("<d", value), at, 1) == at + len(struct.pack("<d", value))


@pytest.mark.parametrize("wire_type", [2, 3, 4, 6, 7])
def test_no_other_wire_type_is_a_number(wire_type: int) -> None:
    with pytest.raises(ValueError, match=f"wire type {wire_type}"):
        skip_number(bytes(8), 0, wire_type)


@given(
    numbers=st.lists(st.tuples(st.sampled_from([(0, 10), (1, 8), (5, 4)]), st.integers(0, 2**31)), max_size=8)
)
def test_numbers_before_a_text_hide_it_from_neither_walk(numbers: list[tuple[tuple[int, int], int]]) -> None:
    """Fields that the schema lacks, of each wire type of a number."""
    head = b""
    for (wire_type, size), value in numbers:
        head += _VarintBytes(1000 << 3 | wire_type)
        head += _VarintBytes(value) if wire_type == 0 else value.to_bytes(size, "little")
    text = b"caf\xe9" * 20
    data = head + bytes([*_VarintBytes(STOP), len(text)]) + text
    assert find_invalid_text(data, SCHEMA) == "stop[0]"
    measured = measure_structure(data, SCHEMA, most_bytes=1 << 20, most_numbers=1)
    assert measured.n_bytes == len(data) - len(text)


def test_a_group_does_not_end_the_measuring() -> None:
    """The parser skips a group that it does not know, and makes the messages behind it."""
    chat = SCHEMA.fields_by_name["chat"].number << 3 | 2
    messages = bytes([chat, 0]) * 100
    group = _VarintBytes(1000 << 3 | 3) + _VarintBytes(1 << 3) + b"\x01" + _VarintBytes(1000 << 3 | 4)
    data = group + messages
    assert router_pb2.GenerateRequest.FromString(data).HasField("chat")
    assert measure_structure(data, SCHEMA, most_bytes=1 << 20, most_numbers=1).n_bytes == len(data)
