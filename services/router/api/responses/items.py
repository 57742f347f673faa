"""Items of the Responses API as the chat template's messages. Pure.

One answer is several items: reasoning, a message, and calls. Items that follow each other in this order
become one message, as the model wrote it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from libs.common import api_bounds
from services.router.api.answers.field_paths import MessageSources
from services.router.api.json_body import Ignore, Json, path_of, text_of
from services.router.api.openai.echoed_forms import is_json_result, json_text
from services.router.api.openai.messages import arguments_text
from slipstream import bounds
from slipstream.bound import shown_name

_ROLES = frozenset({"user", "assistant", "system", "developer"})
_FIELDS: Mapping[str, frozenset[str]] = {
    "message": frozenset({"type", "role", "content", "id", "status"}),
    "function_call": frozenset({"type", "id", "call_id", "name", "arguments", "status"}),
    "function_call_output": frozenset({"type", "id", "call_id", "output", "status"}),
    "reasoning": frozenset({"type", "id", "summary", "content", "encrypted_content", "status"}),
}
_PART_FIELDS = frozenset({"type", "text", "annotations", "logprobs"})
# The texts of a part: of the client, and of an answer, of which other servers make refusals too.
_INPUT_PARTS: Mapping[str, str] = {"input_text": "text", "text": "text"}
_OUTPUT_PARTS: Mapping[str, str] = {**_INPUT_PARTS, "output_text": "text", "refusal": "refusal"}


def kind_of(item: Json) -> str:
    """The item's type. Clients leave it out of messages and of references."""
    kind = item.get("type")
    if kind is None:
        return "message" if "role" in item or "id" not in item else "item_reference"
    return kind if isinstance(kind, str) else str(kind)


def add_items(into: MessageSources, items: Iterable[tuple[str, Any]], ignore: Ignore) -> None:
    """Append the messages of items, each with its path. Raises InvalidArgument naming the first defect.

    References must have been replaced by what they refer to.
    """
    conversation = _InputConversation(into, ignore)
    for path, item in items:
        if not isinstance(item, dict):
            raise bounds.TYPE.refused(path, expected="an object")
        conversation.add(item, path)
    conversation.end_answer()


class _InputConversation:
    """The messages so far, and the answer whose items are being read."""

    def __init__(self, into: MessageSources, ignore: Ignore) -> None:
        self._into = into
        self._ignore = ignore
        self._answer: dict[str, Any] | None = None
        self._reasoning: list[str] = []  # of the answer; thousands of items are joined once
        self._path = ""  # of the answer's first item

    def add(self, item: Json, path: str) -> None:
        """Read one item."""
        kind = kind_of(item)
        if kind not in _FIELDS:
            raise api_bounds.ITEM_TYPE.refused(f"{path}.type", kind=shown_name(kind))
        if not isinstance(item.get("id"), str | None):
            raise bounds.TYPE.refused(f"{path}.id", expected="a string")
        for name in item.keys() - _FIELDS[kind]:
            if item[name] is not None:
                self._ignore(path_of(path, name))
        if kind == "reasoning":
            self._add_reasoning(item, path)
        elif kind == "function_call":
            self._open(path).setdefault("tool_calls", []).append(_call(item, path))
        elif kind == "function_call_output":
            self.end_answer()
            self._into.add(self._result(item, path), path)
        else:
            self._add_message(item, path)

    def end_answer(self) -> None:
        """Append the answer that is open. Reasoning that led to nothing is left out."""
        answer, self._answer = self._answer, None
        reasoning, self._reasoning = "".join(self._reasoning), []
        if answer is None:
            return
        if "content" not in answer and "tool_calls" not in answer:
            self._ignore(self._path)
            return
        if reasoning:
            answer["reasoning_content"] = reasoning
        self._into.add({"content": "", **answer}, self._path)

    def _result(self, item: Json, path: str) -> dict[str, Any]:
        output = item.get("output")
        if is_json_result(output):
            text = json_text(output)
        else:
            text = _texts(output, f"{path}.output", _INPUT_PARTS, self._ignore)
        return {"role": "tool", "tool_call_id": text_of(item, "call_id", path), "content": text}

    def _open(self, path: str) -> dict[str, Any]:
        if self._answer is None:
            self._answer = {"role": "assistant"}
            self._path = path
        return self._answer

    def _add_reasoning(self, item: Json, path: str) -> None:
        if self._answer is not None and self._answer.keys() & {"content", "tool_calls"}:
            self.end_answer()
        content = item.get("content")
        name, kinds = (
            ("content", {"reasoning_text": "text"}) if content else ("summary", {"summary_text": "text"})
        )
        text = _texts(item.get(name) or [], f"{path}.{name}", kinds, self._ignore)
        if not text and item.get("encrypted_content") is not None:
            self._ignore(f"{path}.encrypted_content")  # another server's, which only that server can read
        self._open(path)
        if text:
            self._reasoning.append(text)

    def _add_message(self, item: Json, path: str) -> None:
        role = item.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise api_bounds.ITEM_ROLE.refused(f"{path}.role")
        kinds = _OUTPUT_PARTS if role == "assistant" else _INPUT_PARTS
        text = _texts(item.get("content"), f"{path}.content", kinds, self._ignore)
        if role != "assistant":
            self.end_answer()
            self._into.add({"role": role, "content": text}, path)
            return
        if self._answer is not None and self._answer.keys() & {"content", "tool_calls"}:
            self.end_answer()
        self._open(path)["content"] = text


def _texts(content: Any, path: str, kinds: Mapping[str, str], ignore: Ignore) -> str:
    """A text, or parts of text as one."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bounds.TYPE.refused(path, expected="a string or a list of parts")
    bounds.CONTENT_PARTS.check(len(content), path)
    return "".join([_part(part, f"{path}[{index}]", kinds, ignore) for index, part in enumerate(content)])


def _part(part: Any, path: str, kinds: Mapping[str, str], ignore: Ignore) -> str:
    if not isinstance(part, dict):
        raise bounds.TYPE.refused(path, expected="an object")
    kind = text_of(part, "type", path)
    if kind not in kinds:
        raise api_bounds.PART_TYPE.refused(f"{path}.type", kind=shown_name(kind), allowed=", ".join(kinds))
    for name in part.keys() - _PART_FIELDS - {kinds[kind]}:
        if part[name] is not None:
            ignore(path_of(path, name))
    return text_of(part, kinds[kind], path)


def _call(item: Json, path: str) -> Json:
    function = {"name": text_of(item, "name", path), "arguments": arguments_text(item.get("arguments"))}
    return {"id": text_of(item, "call_id", path), "type": "function", "function": function}
