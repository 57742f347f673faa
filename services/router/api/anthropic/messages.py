"""Messages of Anthropic's API, made of blocks, as the chat template's messages. Pure.

A client echoes blocks of answers, its own and those of other servers. Fields without a meaning here are left
out and named; a block whose content the model cannot see is refused by its type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from libs.common import api_bounds
from services.router.api.answers.field_paths import MessageSources
from services.router.api.anthropic.signature import carried
from services.router.api.json_body import Ignore, Json, Text, path_of, text_of
from services.router.api.openai.messages import arguments_text
from slipstream import bounds
from slipstream.bound import shown_name


class MessageParam(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """One entry of `messages`."""

    role: Text = None
    content: Any = None


# The fields of each kind of block that have a meaning here.
_FIELDS: Mapping[str, frozenset[str]] = {
    "text": frozenset({"type", "text"}),
    "thinking": frozenset({"type", "thinking", "signature"}),
    "tool_use": frozenset({"type", "id", "name", "input"}),
    "tool_result": frozenset({"type", "tool_use_id", "content"}),
}
_OF_ROLE: Mapping[str, frozenset[str]] = {
    "user": frozenset({"text", "tool_result"}),
    "assistant": frozenset({"text", "thinking", "redacted_thinking", "tool_use"}),
    "system": frozenset({"text"}),
}
# Marks of the client's cache and its own book-keeping: they change no answer, and are no news to anybody.
_SILENT = frozenset({"cache_control"})


def parse_messages(given: Sequence[MessageParam], system: Any, ignore: Ignore) -> MessageSources:
    """The system prompt and the messages. Raises InvalidArgument naming the first field that does not fit."""
    bounds.MESSAGES.check(len(given))
    into = MessageSources()
    if system is not None and (text := _texts(system, "system", ignore, role="system")):
        into.add({"role": "system", "content": text}, "system")
    for index, message in enumerate(given):
        path = f"messages[{index}]"
        if message.role is None or message.role not in _OF_ROLE:
            raise api_bounds.MESSAGES_ROLE.refused(f"{path}.role")
        if isinstance(message.content, str):
            into.add({"role": message.role, "content": message.content}, path)
            continue
        blocks = _blocks(message.content, f"{path}.content")
        if message.role == "assistant":
            into.add(_assistant(blocks, f"{path}.content", ignore), path)
        else:
            _add_user(into, blocks, f"{path}.content", ignore, role=message.role)
    if given[-1].role == "assistant":
        _check_prefill(into.messages[-1], f"messages[{len(given) - 1}].content")
    return into


def _check_prefill(message: Mapping[str, Any], path: str) -> None:
    """Whether an answer can continue the message."""
    text = message["content"]
    if message.get("tool_calls") or text != text.rstrip():
        raise api_bounds.PREFILL.refused(path)


def _blocks(content: Any, path: str) -> Sequence[Json]:
    if not isinstance(content, list):
        raise bounds.TYPE.refused(path, expected="a string or a list of blocks")
    bounds.CONTENT_PARTS.check(len(content), path)
    for index, block in enumerate(content):
        if not isinstance(block, dict):
            raise bounds.TYPE.refused(f"{path}[{index}]", expected="an object")
    return content


def _assistant(blocks: Sequence[Json], path: str, ignore: Ignore) -> dict[str, Any]:
    """One answer: its thinking, its text and its calls, in the template's order."""
    thinking, texts, calls = [], [], []
    for index, block in enumerate(blocks):
        where = f"{path}[{index}]"
        match _kind(block, where, ignore, role="assistant"):
            case "text":
                texts.append(text_of(block, "text", where))
            case "thinking":
                thinking.append(text_of(block, "thinking", where) or carried(block.get("signature")))
            case "redacted_thinking":
                ignore(where)  # another server's, which only that server can read
            case _:
                calls.append(_call(block, where))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if any(thinking):
        message["reasoning_content"] = "".join(thinking)
    if calls:
        message["tool_calls"] = calls
    return message


def _add_user(into: MessageSources, blocks: Sequence[Json], path: str, ignore: Ignore, *, role: str) -> None:
    """The results of tools as separate messages, and each run of texts as one message."""
    texts: list[str] = []
    start = 0
    for index, block in enumerate(blocks):
        where = f"{path}[{index}]"
        if _kind(block, where, ignore, role=role) == "text":
            start = start if texts else index
            texts.append(text_of(block, "text", where))
            continue
        if texts:
            into.add({"role": role, "content": "".join(texts)}, f"{path}[{start}]")
            texts = []
        content = block.get("content")
        result = _texts(content, f"{where}.content", ignore, role="system") if content is not None else ""
        call_id = text_of(block, "tool_use_id", where)
        into.add({"role": "tool", "tool_call_id": call_id, "content": result}, where)
    if texts or not blocks:
        into.add({"role": role, "content": "".join(texts)}, f"{path}[{start}]" if blocks else path)


def _texts(content: Any, path: str, ignore: Ignore, *, role: str) -> str:
    """A text, or blocks of text as one."""
    if isinstance(content, str):
        return content
    texts = []
    for index, block in enumerate(_blocks(content, path)):
        where = f"{path}[{index}]"
        _kind(block, where, ignore, role=role)
        texts.append(text_of(block, "text", where))
    return "".join(texts)


def _kind(block: Json, path: str, ignore: Ignore, *, role: str) -> str:
    """The block's type. Its fields without a meaning are named."""
    kind = block.get("type")
    if not isinstance(kind, str):
        raise bounds.TYPE.refused(f"{path}.type", expected="a string")
    if kind not in _OF_ROLE[role]:
        allowed = ", ".join(sorted(_OF_ROLE[role]))
        raise api_bounds.BLOCK.refused(f"{path}.type", kind=shown_name(kind), allowed=allowed)
    for name in block.keys() - _FIELDS.get(kind, block.keys()) - _SILENT:
        if block[name] is not None:
            ignore(path_of(path, name))
    return kind


def _call(block: Json, path: str) -> Json:
    """A call as the model wrote it. Clients parse arguments to an object, whose order of keys stays."""
    name, call_id = text_of(block, "name", path), text_of(block, "id", path)
    function = {"name": name, "arguments": arguments_text(block.get("input"))}
    return {"id": call_id, "type": "function", "function": function}
