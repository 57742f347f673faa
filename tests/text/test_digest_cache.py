"""DigestCache: values cached by the digest of their source, within a byte budget."""

from __future__ import annotations

from typing import Any

import pytest

from libs.text.digest_cache import DigestCache, digest_of
from libs.text.tool_declaration import tools_text
from libs.text.tool_schema import validate_tools
from slipstream.errors import InvalidArgument


def _tool(default: Any, **more: Any) -> dict[str, Any]:
    properties = {"n": {"type": "integer", "default": default, **more}}
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def test_equal_json_in_other_objects_has_the_same_digest() -> None:
    word = "".join(["de", "fault"])
    assert digest_of([_tool(1)]) == digest_of([_tool(1)]) != digest_of([_tool(2)])
    assert digest_of({word: word}) == digest_of({"default": "default"})


def test_equal_values_that_are_written_differently_have_different_digests() -> None:
    values: list[object] = [1, 1.0, True, "1", [1], (1,), None, 0, 0.0, -0.0, False, "", {}, []]
    values += [{"a": 1, "b": 2}, {"b": 2, "a": 1}]
    assert len({digest_of(value) for value in values}) == len(values)


def test_values_that_are_too_deep_or_no_json_have_no_digest() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert digest_of(deep) is None
    assert digest_of([object()]) is None
    cache: DigestCache[int] = DigestCache(max_bytes=10)
    cache.keep(None, 1, n_bytes=1)
    assert (cache.get(None), cache.n_bytes) == (None, 0)


def test_the_least_recently_used_entry_is_evicted() -> None:
    cache: DigestCache[int] = DigestCache(max_bytes=10)
    for value in range(3):
        cache.keep(b"%d" % value, value, n_bytes=4)
        assert cache.get(b"0") == 0
        assert cache.n_bytes <= 10
    assert [cache.get(b"%d" % value) for value in range(3)] == [0, None, 2]
    cache.keep(b"0", 0, n_bytes=4)
    cache.keep(b"too large", 9, n_bytes=11)
    assert (cache.n_bytes, cache.get(b"too large")) == (8, None)


def test_equal_but_differently_written_tools_are_not_confused() -> None:
    for _ in range(2):
        texts = [tools_text([_tool(default)]) for default in (1, True, 1.0)]
        assert [text.split("Default: ")[1].split("\n")[0] for text in texts] == ["1", "True", "1.0"]


def test_only_valid_tools_are_cached() -> None:
    for _ in range(2):
        assert validate_tools([_tool(1)]) == ("f",)
        with pytest.raises(InvalidArgument) as error:
            validate_tools([_tool(1), {**_tool(1), "type": "text"}], field="given")
        assert error.value.field == "given[1].type"
        with pytest.raises(InvalidArgument, match="declared twice"):
            validate_tools([_tool(1), _tool(1)])
