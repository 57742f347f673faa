"""Messages of a call become items, and items the same messages again."""

from __future__ import annotations

from typing import Any

import pytest

from services.router.api.answers.field_paths import MessageSources
from services.router.api.responses.items import add_items
from services.router.api.responses.rpc.call_items import items_of
from services.router.api.responses.rpc.messages import item_message
from services.router.api.responses.stored.items import items_to_store

USER = {"role": "user", "content": "Where is it?"}
CALL = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"a": 1}'}}
OTHER = {"id": "c2", "type": "function", "function": {"name": "seek", "arguments": "{}"}}


def assistant(content: str = "", **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "system", "content": "Be kind."}, USER, assistant("There."), USER],
        [{"role": "developer", "content": ""}, USER],
        [
            USER,
            assistant(tool_calls=[CALL, OTHER]),
            {"role": "tool", "tool_call_id": "c1", "content": "here"},
        ],
        [USER, assistant("I look.", tool_calls=[CALL], reasoning_content="Hm.")],
        [USER, assistant(reasoning_content="Hm.")],
        [USER, assistant("One."), assistant("Two.")],
        [USER, assistant("One."), assistant(tool_calls=[CALL])],
        [USER, assistant(tool_calls=[CALL]), assistant(tool_calls=[OTHER])],
        [USER, assistant("One.", reasoning_content="a"), assistant("Two.", reasoning_content="b")],
        [USER, assistant(), assistant("Two.")],
    ],
)
def test_items_make_the_messages_that_they_were_made_of(messages: list[dict[str, Any]]) -> None:
    stored = items_to_store(items_of(messages), "k")
    sources = MessageSources()
    add_items(sources, [("", item) for item in stored], lambda path: pytest.fail(path))
    assert sources.messages == messages
    assert len({item["id"] for item in stored}) == len(stored)


@pytest.mark.parametrize("odd", [9, {}, [1], True, None])
def test_a_stored_item_with_odd_values_is_shown(odd: Any) -> None:
    """The request that stored it does not read these."""
    part = {"type": "refusal", "refusal": "no", "text": odd}
    shown = item_message({"type": "message", "role": "assistant", "id": odd, "content": [part]})
    assert (shown.id, shown.message.content[0].text) == ("", "no")
