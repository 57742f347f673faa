"""Forms of a conversation's parts that older clients and other servers have, as the form of today. Pure.

A client echoes them from its history; a refusal would end its session. The template renders the result as it
renders the form of today, and anything without such a form as text.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from services.router.api.json_body import Json

# The fields of a reasoning object that hold its text; others, such as an effort, hold none.
_REASONING_TEXTS = ("text", "content", "thinking", "summary")
_REASONING_DEPTH = 4  # a list of objects with lists of parts

# Types of parts. Those of media name where the media is; a tool's object of type "file" has none of that.
_TEXT_TYPES = frozenset({"text", "input_text", "output_text", "refusal"})
_MEDIA_TYPES = frozenset(
    {"image", "image_url", "input_image", "audio", "audio_url", "input_audio"}
    | {"video", "video_url", "input_video", "file", "input_file", "document"}
)
_MEDIA = frozenset(
    {"source", "file_id", "file_data", "file_url", "file"}
    | {"image", "image_url", "audio", "audio_url", "input_audio", "video", "video_url"}
)


class PastCalls:
    """The calls of the messages so far, by which a result without an id finds its call."""

    def __init__(self) -> None:
        self._n_calls = 0
        self._last_ids: dict[str, str] = {}  # by name
        self._last_id: str | None = None
        # An OrderedDict finds its first key at once, also after many that were deleted.
        self._unanswered: OrderedDict[str, str] = OrderedDict()  # names by id
        self._unanswered_of: dict[str, OrderedDict[str, None]] = {}  # ids by name
        self._is_turn_over = False

    def add(self, call_id: Any, name: str) -> str:
        """Note a call. The result is its id: its own, or the one of Kimi's format."""
        made = f"functions.{name}:{self._n_calls}" if call_id in (None, "") else str(call_id)
        self._n_calls += 1
        if self._is_turn_over:  # what stands without a result was given up
            self._is_turn_over = False
            self._unanswered.clear()
            self._unanswered_of.clear()
        self.note_answer(made)  # an id that is used again
        self._last_ids[name] = self._last_id = made
        self._unanswered[made] = name
        self._unanswered_of.setdefault(name, OrderedDict())[made] = None
        return made

    def end_turn(self) -> None:
        """Note a message of the user: the next call begins a turn, in which earlier calls get no result."""
        self._is_turn_over = True

    def note_answer(self, call_id: str) -> None:
        """Note that the call has a result."""
        name = self._unanswered.pop(call_id, None)
        if name is not None:
            del self._unanswered_of[name][call_id]

    def awaited(self, name: str | None) -> str | None:
        """The id of the first call of this name, or of any, that has no result.

        The last one where all have a result; None: there is none.
        """
        waiting: Iterable[str] = self._unanswered_of.get(name, {}) if name else self._unanswered
        last = self._last_ids.get(name) if name else self._last_id
        return next(iter(waiting), last)


def json_text(given: object) -> str:
    """A value that a client parsed, as the text of JSON."""
    return json.dumps(given, ensure_ascii=False)


def is_json_result(content: object) -> bool:
    """Whether this is a tool's result as a value, and not text, parts of a message, or nothing."""
    if not isinstance(content, list):
        return not isinstance(content, str | None)
    if not all(isinstance(part, dict) and isinstance(part.get("type"), str) for part in content):
        return True
    return not any(_is_content_part(part) for part in content)


def _is_content_part(part: Json) -> bool:
    """Whether an object with a type is a part of a message: a tool's own objects may have a type, too."""
    return part["type"] in _TEXT_TYPES or (part["type"] in _MEDIA_TYPES and not _MEDIA.isdisjoint(part))


def reasoning_text(given: object, *, depth: int = 0) -> str | None:
    """The text of an answer's reasoning; None: the value has none, or has it too deep."""
    if isinstance(given, str):
        return given
    if depth == _REASONING_DEPTH:
        return None
    if isinstance(given, Mapping):
        texts = (reasoning_text(given[name], depth=depth + 1) for name in _REASONING_TEXTS if name in given)
        return next((text for text in texts if text is not None), None)
    if isinstance(given, Sequence):
        parts = [reasoning_text(part, depth=depth + 1) for part in given]
        return "".join([part for part in parts if part is not None]) or None
    return None


def calls_of_parts(content: object) -> Sequence[tuple[int, Json]]:
    """The calls that stand as `tool_use` among the parts of an answer, with their indices."""
    parts = content if isinstance(content, list) else ()
    return [
        (i, part) for i, part in enumerate(parts) if isinstance(part, dict) and part["type"] == "tool_use"
    ]
