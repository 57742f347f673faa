"""structure_bytes and is_nested_deeper against readers of one character at a time."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.text import json_structure
from libs.text.json_structure import is_nested_deeper, structure_bytes

MOST = 1 << 30
VALUES = st.recursive(
    st.none() | st.integers() | st.text(alphabet='a"\\ \n,[}', max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text('"\\x', max_size=3), inner, max_size=4)
    ),
    max_leaves=20,
)


def count_slowly(text: str) -> int:
    count, in_string, escaped = 0, False, False
    for character in text:
        if in_string:
            in_string = escaped or character != '"'
            escaped = not escaped and character == "\\"
            count += not in_string
        elif character == '"':
            in_string = True
        elif character not in " \t\r\n":
            count += 1
    return count


@given(value=VALUES, piece_bytes=st.integers(1, 9), indent=st.sampled_from([None, 2]))
def test_strings_and_white_space_are_not_structure(
    value: object, piece_bytes: int, indent: int | None
) -> None:
    """Pieces of any length give the same count, wherever they cut a string or an escape."""
    text = json.dumps(value, indent=indent)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_structure, "_PIECE_BYTES", piece_bytes)
        assert structure_bytes(text.encode(), at_most=MOST) == count_slowly(text)


def test_counting_ends_soon_after_the_bound() -> None:
    """The count of 8 MiB of brackets shows that only the first piece was looked at."""
    assert structure_bytes(b"[]," * (8 << 20), at_most=1000) <= json_structure._PIECE_BYTES


def test_a_long_string_is_one() -> None:
    assert structure_bytes(b'{"a":"' + b"x" * (8 << 20) + b'"}', at_most=MOST) == len("{:}") + 2


def depth_of(value: object) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth_of, value.values()), default=0)
    return 1 + max(map(depth_of, value), default=0) if isinstance(value, list) else 0


@given(value=VALUES, sizes=st.tuples(st.integers(1, 9), st.integers(1, 5)), levels=st.integers(0, 6))
def test_brackets_of_strings_are_no_levels(value: object, sizes: tuple[int, int], levels: int) -> None:
    """Pieces of any length give the same depth."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_structure, "_PIECE_BYTES", sizes[0])
        patch.setattr(json_structure, "_STEPS", sizes[1])
        assert is_nested_deeper(json.dumps(value).encode(), levels) == (depth_of(value) > levels)


@pytest.mark.parametrize("text", [b"]" * 9 + b"[" * 3, b"[" * 3, b"[[[ \xff", b'{"a":[{"b":', b'[[["[['])
def test_broken_json_has_a_depth(text: bytes) -> None:
    assert is_nested_deeper(text, 2) == (text != b"]" * 9 + b"[" * 3)
