"""Reading JSON bodies into structs, and the first defect of a body that does not fit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec
import pytest

from services.router.api import json_body
from services.router.api.json_body import (
    Flag,
    NoEffect,
    Number,
    Text,
    WholeNumber,
    decode_body,
    read_object,
)
from slipstream.bound import shown_name
from slipstream.errors import InvalidArgument


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    name: Text = None


class Body(msgspec.Struct, forbid_unknown_fields=True):
    name: Text = None
    seed: WholeNumber = None
    share: Number = None
    stream: Flag = None
    stop: Any = None
    inner: Inner | None = None
    items: list[Inner] | None = None
    free: dict[str, Any] | None = None
    functions: NoEffect = None

    REFUSED: ClassVar[Mapping[str, tuple[object, ...]]] = {"beams": (1,), "store": (False,)}


IGNORED: list[str] = []
DECODER = msgspec.json.Decoder(Body)


def decode(text: str | bytes) -> Body:
    return decode_body(text.encode() if isinstance(text, str) else text, DECODER, IGNORED.append)


def test_a_body_that_fits_is_read_as_it_is() -> None:
    body = decode(
        '{"name": "a", "seed": 3, "share": 1, "stop": ["x"], "inner": {"name": "b"}, "items": [{}]}'
    )
    assert body == Body(name="a", seed=3, share=1, stop=["x"], inner=Inner("b"), items=[Inner()])
    assert type(body.share) is int
    assert decode(json.dumps(dict.fromkeys(Body.__struct_fields__))) == Body()  # null counts as left out


def test_whole_numbers_may_be_written_as_fractions() -> None:
    body = decode('{"seed": 2.0, "share": 2.0}')
    assert (body.seed, body.share) == (2, 2.0)
    assert (type(body.seed), type(body.share)) == (int, float)


@pytest.mark.parametrize("text", ['{"seed": "x", "seed": 2}', '{"seed": 1, "seed": 2}'])
def test_of_a_repeated_field_the_last_counts(text: str) -> None:
    assert decode(text).seed == 2


def test_numbers_beyond_json_are_left_to_the_bounds() -> None:
    share = decode('{"share": NaN}').share
    assert share is not None and share != share
    assert decode('{"share": 1e999}').share == float("inf")
    assert decode(f'{{"seed": {1 << 80}}}').seed == 1 << 80


DEFECTS = [
    ({"seed": 2.5}, "seed", "must be a whole number"),
    ({"seed": float("inf")}, "seed", "must be a whole number"),
    ({"seed": "2"}, "seed", "must be a whole number"),
    ({"seed": True}, "seed", "must be a whole number"),
    ({"share": False}, "share", "must be a number"),
    ({"name": 1.0}, "name", "must be a string"),
    ({"stream": 1}, "stream", "must be true or false"),
    ({"items": {}}, "items", "must be a list"),
    ({"free": []}, "free", "must be an object"),
    ({"inner": []}, "inner", "must be an object"),
    ({"inner": {"name": 1}}, "inner.name", "must be a string"),
    ({"items": [{}, 1]}, "items[1]", "must be an object"),
    ({"name": 1, "beams": 2}, "beams", "is not supported"),
    ({"name": 1, "store": True}, "store", "is not supported"),
    ({"name": 1, "functions": []}, "functions", "is not supported"),
    ({"inner": {"x": 1}, "name": 1}, "name", "must be a string"),
]


def test_unknown_fields_are_left_out_and_named() -> None:
    IGNORED.clear()
    body = decode('{"name": "a", "sed": null, "beams": 1, "items": [{}, {"x": {"y": 1}}], "inner": {"z": 1}}')
    assert body == Body(name="a", items=[Inner(), Inner()], inner=Inner())
    assert IGNORED == ["sed", "items[1].x", "inner.z"]


@pytest.mark.parametrize(("body", "field", "words"), DEFECTS)
def test_unsupported_fields_are_named_before_wrong_types_and_inner_defects(
    body: dict[str, object], field: str, words: str
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        decode(json.dumps(body))
    assert (refused.value.field, refused.value.message) == (field, f"{field}: {words}")
    with pytest.raises(InvalidArgument) as refused:
        read_object(body, Body, IGNORED.append, "tools[1]")
    assert refused.value.message == f"tools[1].{field}: {words}"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b'{"name": "caf\xe9"}', "name"),
        (b'{"items": [{"name": "\\ud800"}]}', "items[0].name"),
        (b'{"free": {"\\ud800": 1}}', "free"),
        (b'{"\\udc00": 1}', "body"),
    ],
)
def test_text_that_is_no_unicode_is_named_by_its_field(body: bytes, field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        decode(body)
    assert refused.value.message == f"{field}: must be valid UTF-8"


def test_a_long_name_is_not_copied_for_each_value_below_it(monkeypatch: pytest.MonkeyPatch) -> None:
    shown_names: list[str] = []

    def shown(name: str) -> str:
        shown_names.append(name)
        return shown_name(name)

    monkeypatch.setattr(json_body, "shown_name", shown)
    name = "A" * (1 << 10)
    values = b"0," * 100 + b'"\\ud800"'
    with pytest.raises(InvalidArgument) as refused:
        decode(b'{"' + name.encode() + b'":[[' + values + b"]]}")
    assert refused.value.field == f"{shown_name(name)}[0][100]"
    assert shown_names == [name]


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"null", b'{"seed": 01}', b"{} x", b'{"stop": ' + b"[" * 100_000]
)
def test_anything_but_one_object_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidArgument) as refused:
        decode(body)
    assert refused.value.field == "body"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"name": "a\nb"}', "is not JSON: invalid control character at line 1 column 12"),
        ('{"name": "a', "is not JSON: unterminated string starting at line 1 column 10"),
        ('{"name" 1}', "is not JSON: expecting ':' delimiter at line 1 column 9"),
    ],
)
def test_a_text_that_is_no_json_is_refused_at_its_place(text: str, words: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        decode(text)
    assert refused.value.reason == words
