"""measure_structure of protobuf messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import SourceCodeInfo
from hypothesis import given
from hypothesis import strategies as st

from services.router.api.rpc.wire import message_structure
from services.router.api.rpc.wire.message_reader import read_message
from services.router.api.rpc.wire.message_structure import (
    MessageStructure,
    is_mostly_prose,
    measure_structure,
)
from slipstream import bounds
from slipstream.errors import InvalidArgument
from slipstream.requests import chat_request
from slipstream.v1 import router_pb2

MOST = 1 << 30
SCHEMA = router_pb2.GenerateRequest.DESCRIPTOR


def structure_bytes(data: bytes, *, at_most: int = MOST) -> int:
    measured = measure_structure(data, SCHEMA, most_bytes=at_most, most_numbers=MOST)
    assert measured.crowded is None
    return measured.n_bytes


def request_of(texts: list[str]) -> router_pb2.GenerateRequest:
    request = chat_request([{"role": "user", "content": text or "-"} for text in texts or ["hi"]], {})
    request.request_id = "r"
    request.stop.extend(texts)
    request.metadata["key"] = "value"
    request.sampling.temperature = 0.5
    request.sampling.logit_bias[7] = 1.0
    return request


@given(texts=st.lists(st.text(max_size=300), max_size=5))
def test_texts_are_not_structure(texts: list[str]) -> None:
    request = request_of(texts)
    data = request.SerializeToString()
    n_text_bytes = len(b"rkeyvalue") + sum(len(text.encode()) for text in request.stop)
    for message in request.chat.messages:
        n_text_bytes += sum(len(part.text.encode()) for part in message.content)
    assert structure_bytes(data) == len(data) - n_text_bytes


@given(data=st.binary(max_size=60))
def test_any_bytes_can_be_counted(data: bytes) -> None:
    request = request_of(["a"]).SerializeToString()
    assert structure_bytes(request + data) >= 0


def test_counting_ends_at_the_bound() -> None:
    """Of four million empty messages no more are looked at than the bound allows."""
    inside = b"\x0a\x00" * (4 << 20)
    data = b"\x12\x80\x80\x80\x04" + inside
    assert len(inside) == 8 << 20
    assert 1000 < structure_bytes(data, at_most=1000) <= 1004


def test_an_unknown_field_is_no_structure() -> None:
    data = b"\xfa\x07\x80\x80\x01" + b"x" * (1 << 14)
    assert structure_bytes(data) == 5


@given(ids=st.lists(st.integers(0, 200_000), max_size=3000))
def test_packed_numbers_are_no_structure(ids: list[int]) -> None:
    request = router_pb2.GenerateRequest(token_ids=router_pb2.TokenIds(ids=ids))
    counted = structure_bytes(request.SerializeToString())
    assert counted <= 10  # the tags and lengths of both lists


def test_numbers_one_by_one_are_structure() -> None:
    one_by_one = b"\x08\x01" * 300  # each with its tag, as no encoder of ours writes them
    data = b"\x1a" + bytes([0xD8, 0x04]) + one_by_one
    field = SCHEMA.fields_by_name["token_ids"].number
    data = bytes([field << 3 | 2]) + data[1:]
    assert structure_bytes(data) >= len(one_by_one)


@given(
    ids=st.lists(st.integers(0, 2**32 - 1), max_size=300),
    stops=st.lists(st.integers(0, 2**32 - 1), max_size=50),
    most=st.integers(0, 350),
    piece_bytes=st.integers(1, 50),
)
def test_packed_numbers_of_all_fields_are_counted(
    ids: list[int], stops: list[int], most: int, piece_bytes: int
) -> None:
    """Pieces of any length give the same count, wherever they cut a number."""
    request = router_pb2.GenerateRequest(token_ids=router_pb2.TokenIds(ids=ids))
    request.sampling.stop_token_ids.extend(stops)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(message_structure, "_PIECE_BYTES", piece_bytes)
        data = request.SerializeToString()
        measured = measure_structure(data, SCHEMA, most_bytes=MOST, most_numbers=most)
    in_order = {"token_ids.ids": len(ids), "sampling.stop_token_ids": len(stops)}
    if SCHEMA.fields_by_name["sampling"].number < SCHEMA.fields_by_name["token_ids"].number:
        in_order = dict(reversed(in_order.items()))
    expected, total = None, 0
    for name, count in in_order.items():
        total += count
        expected = expected or (name if total > most else None)
    assert measured.crowded == expected


@given(data=st.binary(max_size=40), most=st.integers(0, 5))
def test_any_bytes_in_a_packed_field_can_be_counted(data: bytes, most: int) -> None:
    field = SCHEMA.fields_by_name["token_ids"].number
    inside = b"\x0a" + bytes([len(data) + 9]) + data  # its end is beyond the message's
    message = bytes([field << 3 | 2, len(inside)]) + inside
    measured = measure_structure(message, SCHEMA, most_bytes=MOST, most_numbers=most)
    assert (measured.crowded is not None) == (sum(byte < 128 for byte in data) > most)


def test_fixed_numbers_have_their_size() -> None:
    message = SourceCodeInfo.Location(path=[1, 2, 300], leading_detached_comments=["a"])
    data = message.SerializeToString()
    measured = measure_structure(data, message.DESCRIPTOR, most_bytes=MOST, most_numbers=2)
    assert measured.crowded == "path"


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (router_pb2.DetokenizeRequest(token_ids=[1]), "token_ids"),
        (router_pb2.GenerateRequest(token_ids=router_pb2.TokenIds(ids=[1])), "prompt"),
        (
            router_pb2.TokenizeRequest(
                request=router_pb2.GenerateRequest(token_ids=router_pb2.TokenIds(ids=[1]))
            ),
            "prompt",
        ),
        (router_pb2.GenerateRequest(sampling=router_pb2.Sampling(stop_token_ids=[1])), "stop_token_ids"),
    ],
)
def test_more_numbers_than_a_message_may_have_are_refused_unread(
    message: Any, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for ids in (
        getattr(getattr(message, "request", message), "token_ids", None),
        getattr(getattr(message, "sampling", None), "stop_token_ids", None),
    ):
        numbers = getattr(ids, "ids", ids)
        if numbers:
            numbers.extend([163_839] * (bounds.MAX_MESSAGE_NUMBERS - 1))
    read_message(message.SerializeToString(), type(message))  # as many as are allowed
    data = message.SerializeToString()
    more = type(message).FromString(data)
    more.MergeFrom(type(message).FromString(data))
    monkeypatch.setattr(type(message), "FromString", None)
    with pytest.raises(InvalidArgument) as refusal:
        read_message(more.SerializeToString(), type(message))
    assert (refusal.value.field, refusal.value.reason) == (field, bounds.NUMBERS.words)


def test_a_prompt_of_a_whole_context_is_read() -> None:
    ids = [163_839] * 262_144
    request = router_pb2.GenerateRequest(token_ids=router_pb2.TokenIds(ids=ids))
    data = request.SerializeToString()
    assert measure_structure(data, SCHEMA, most_bytes=MOST, most_numbers=len(ids)) == MessageStructure(
        8, None
    )
    assert list(read_message(data, router_pb2.GenerateRequest).token_ids.ids) == ids


def test_a_long_conversation_is_mostly_prose() -> None:
    request = chat_request([{"role": "user", "content": "Where is my order? " * 1000}] * 10, {})
    assert is_mostly_prose(request.SerializeToString(), SCHEMA)
    assert is_mostly_prose(router_pb2.GenerateRequest(prompt="a" * 100_000).SerializeToString(), SCHEMA)


def _with_calls(request: router_pb2.GenerateRequest) -> None:
    for _ in range(1000):
        request.chat.messages[0].tool_calls.add()


def _with_json(request: router_pb2.GenerateRequest) -> None:
    request.chat.tools.add(name="f", parameters=f"[{'{},' * 1000}{{}}]")


def _with_arguments(request: router_pb2.GenerateRequest) -> None:
    request.chat.messages[0].tool_calls.add(name="f", arguments="[" * 2000)


def _with_ids(request: router_pb2.GenerateRequest) -> None:
    request.sampling.stop_token_ids.extend(range(200))


def _with_much(request: router_pb2.GenerateRequest) -> None:
    request.chat.messages[0].content[0].text = "a" * (256 << 10)


@pytest.mark.parametrize("add", [_with_calls, _with_json, _with_arguments, _with_ids, _with_much])
def test_what_takes_long_to_read_is_not_prose(add: Callable[[router_pb2.GenerateRequest], None]) -> None:
    request = request_of(["Where is my order? "])
    assert is_mostly_prose(request.SerializeToString(), SCHEMA)
    add(request)
    assert not is_mostly_prose(request.SerializeToString(), SCHEMA)
