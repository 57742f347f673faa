"""structure_bytes of protobuf messages."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.router.api.rpc.message_structure import structure_bytes
from slipstream.requests import chat_request
from slipstream.v1 import router_pb2

MOST = 1 << 30
SCHEMA = router_pb2.GenerateRequest.DESCRIPTOR


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
    assert structure_bytes(data, SCHEMA, at_most=MOST) == len(data) - n_text_bytes


@given(data=st.binary(max_size=60))
def test_any_bytes_can_be_counted(data: bytes) -> None:
    request = request_of(["a"]).SerializeToString()
    assert structure_bytes(request + data, SCHEMA, at_most=MOST) >= 0


def test_counting_ends_at_the_bound() -> None:
    """Of four million empty messages no more are looked at than the bound allows."""
    inside = b"\x0a\x00" * (4 << 20)
    data = b"\x12\x80\x80\x80\x04" + inside
    assert len(inside) == 8 << 20
    assert 1000 < structure_bytes(data, SCHEMA, at_most=1000) <= 1004


def test_an_unknown_field_is_no_structure() -> None:
    data = b"\xfa\x07\x80\x80\x01" + b"x" * (1 << 14)
    assert structure_bytes(data, SCHEMA, at_most=MOST) == 5


@given(ids=st.lists(st.integers(0, 200_000), max_size=3000))
def test_packed_numbers_are_no_structure(ids: list[int]) -> None:
    request = router_pb2.GenerateRequest(token_ids=router_pb2.TokenIds(ids=ids))
    counted = structure_bytes(request.SerializeToString(), SCHEMA, at_most=MOST)
    assert counted <= 10  # the tags and lengths of both lists


def test_numbers_one_by_one_are_structure() -> None:
    one_by_one = b"\x08\x01" * 300  # each with its tag, as no encoder of ours writes them
    data = b"\x1a" + bytes([0xD8, 0x04]) + one_by_one
    field = SCHEMA.fields_by_name["token_ids"].number
    data = bytes([field << 3 | 2]) + data[1:]
    assert structure_bytes(data, SCHEMA, at_most=MOST) >= len(one_by_one)
