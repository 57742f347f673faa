"""JSON in pieces is the JSON of the whole value, and no piece is long."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from services.router.api.answers.long_json import JSON_PIECE_BYTES, LongJson, json_pieces, long_parts

LONG = 'a\u00e9\U0001f600"\\\n\0' * (JSON_PIECE_BYTES // 4)
LEAVES = st.sampled_from(
    ["", "short", LONG, msgspec.Raw(b"[1]"), msgspec.Raw(msgspec.json.encode(LONG)), 7, None]
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
)


@given(VALUES)
def test_pieces_are_the_whole_value(value: Any) -> None:
    assert b"".join(json_pieces(long_parts(value))) == msgspec.json.encode(value)


def test_no_piece_is_long() -> None:
    value = long_parts({"text": LONG, "rows": msgspec.Raw(msgspec.json.encode([LONG])), "end": 1})
    assert isinstance(value["text"], LongJson) and isinstance(value["rows"], LongJson)
    *full, last = json_pieces(value)
    assert min(map(len, full)) >= JSON_PIECE_BYTES
    assert max(map(len, [*full, last])) < 8 * JSON_PIECE_BYTES  # an escaped character has six bytes at most
