"""Input items in the form in which a client reads them again: with ids, and contents as parts. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from libs.common import api_bounds
from services.router.api.json_body import Json
from services.router.api.responses.items import kind_of
from slipstream import errors
from slipstream.bound import shown

_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
PAGE_ITEMS = 20  # as OpenAI's


def items_to_store(items: Iterable[Json], key: str) -> list[Json]:
    """The input of a response. `key` is the part of the response's id that makes its items' ids unique."""
    return [_stored(item, f"{key}_i{index}") for index, item in enumerate(items)]


def read_response(body: bytes) -> Json:
    """A stored response. Its log probabilities, which may have megabytes, stay JSON."""
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    output = msgspec.json.decode(fields["output"], type=list[dict[str, msgspec.Raw]])
    read = {name: msgspec.json.decode(fields[name]) for name in fields if name != "output"}
    return {name: read.get(name) for name in fields} | {"output": [read_item(item) for item in output]}


def read_item(item: Mapping[str, msgspec.Raw]) -> Json:
    """An item of a stored response's output. Its log probabilities, which may have megabytes, stay JSON."""
    made: dict[str, Any] = {name: msgspec.json.decode(item[name]) for name in item if name != "content"}
    if "content" in item and made.get("type") == "message":
        parts = msgspec.json.decode(item["content"], type=list[dict[str, msgspec.Raw]])
        made["content"] = [_read_part(part) for part in parts]
    elif "content" in item:
        made["content"] = msgspec.json.decode(item["content"])
    return {name: made[name] for name in item}


def _read_part(part: Mapping[str, msgspec.Raw]) -> Json:
    return {name: part[name] if name == "logprobs" else msgspec.json.decode(part[name]) for name in part}


def _stored(item: Json, suffix: str) -> Json:
    kind = kind_of(item)
    made: dict[str, Any] = {**item, "type": kind, "id": item.get("id") or f"{_PREFIXES[kind]}_{suffix}"}
    made["status"] = item.get("status") or "completed"
    content = item.get("content")
    if kind == "message" and isinstance(content, str):
        if item["role"] == "assistant":
            made["content"] = [{"type": "output_text", "text": content, "annotations": []}]
        else:
            made["content"] = [{"type": "input_text", "text": content}]
    return made


def page_of(items: Sequence[Json], *, after: str | None, order: str, limit: int) -> Json:
    """A list object with the items after the one with the id `after`. Raises InvalidArgument, NotFound."""
    api_bounds.PAGE_LIMIT.check(limit)
    if order not in ("asc", "desc"):
        raise api_bounds.PAGE_ORDER.refused()
    ordered = list(items) if order == "asc" else list(reversed(items))
    start = 0
    if after is not None:
        places = [index for index, item in enumerate(ordered) if item["id"] == after]
        if not places:
            raise errors.NotFound(f"item {shown(after)} is none of this response's input", field="after")
        start = places[0] + 1
    page = ordered[start : start + limit]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": "", "last_id": ""}
    return {"object": "list", "data": page, **ends, "has_more": start + limit < len(ordered)}
