"""What is remembered is what was made of the same value, within bounds."""

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


def test_the_same_said_by_other_objects_has_the_same_digest() -> None:
    word = "".join(["de", "fault"])
    assert digest_of([_tool(1)]) == digest_of([_tool(1)]) != digest_of([_tool(2)])
    assert digest_of({word: word}) == digest_of({"default": "default"})


def test_equal_values_that_are_written_differently_have_different_digests() -> None:
    values: list[object] = [1, 1.0, True, "1", [1], (1,), None, 0, 0.0, -0.0, False, "", {}, []]
    values += [{"a": 1, "b": 2}, {"b": 2, "a": 1}]
    assert len({digest_of(value) for value in values}) == len(values)


def test_what_is_no_json_or_too_deep_has_no_digest() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert digest_of(deep) is None
    assert digest_of([object()]) is None
    memory: DigestCache[int] = DigestCache(max_bytes=10)
    memory.keep(None, 1, n_bytes=1)
    assert (memory.get(None), memory.n_bytes) == (None, 0)


def test_what_was_used_least_lately_gives_way() -> None:
    memory: DigestCache[int] = DigestCache(max_bytes=10)
    for value in range(3):
        memory.keep(b"%d" % value, value, n_bytes=4)
        assert memory.get(b"0") == 0
        assert memory.n_bytes <= 10
    assert [memory.get(b"%d" % value) for value in range(3)] == [0, None, 2]
    memory.keep(b"0", 0, n_bytes=4)
    memory.keep(b"too large", 9, n_bytes=11)
    assert (memory.n_bytes, memory.get(b"too large")) == (8, None)


def test_tools_that_are_equal_are_written_each_as_they_are() -> None:
    for _ in range(2):
        texts = [tools_text([_tool(default)]) for default in (1, True, 1.0)]
        assert [text.split("Default: ")[1].split("\n")[0] for text in texts] == ["1", "True", "1.0"]


def test_only_sound_tools_are_remembered() -> None:
    for _ in range(2):
        assert validate_tools([_tool(1)]) == ("f",)
        with pytest.raises(InvalidArgument) as error:
            validate_tools([_tool(1, type="text")], field="given")
        assert error.value.field == "given[0].function.parameters.properties.n.type"
        with pytest.raises(InvalidArgument, match="declared twice"):
            validate_tools([_tool(1), _tool(1)])
