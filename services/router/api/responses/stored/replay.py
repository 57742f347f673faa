"""The events of a response in the background, made from the response itself, so that they can be read again.

Their numbers depend on the whole response alone: all its streams have the same events. A text is one delta.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from libs.common import api_bounds
from services.router.api.answers.long_json import long_parts
from services.router.api.json_body import Json
from services.router.api.responses.writer import event_pieces

# The first events, with the status that the response had then.
_BEGINNING = (("created", "queued"), ("queued", "queued"), ("in_progress", "in_progress"))
_LAST = {"completed": "completed", "incomplete": "incomplete", "failed": "failed", "cancelled": "incomplete"}
Event = tuple[str, Json]
NumberedPiece = tuple[int, bytes]
_UNFINISHED = ("queued", "in_progress")


def pieces_of(response: Json, *, after: int) -> Iterator[NumberedPiece]:
    """The events with numbers above `after` that the response has had until now, in pieces. Pure.

    Several repeat the whole response, so all together take several times its memory. Raises InvalidArgument
    where the response has ended with a number below `after`.
    """
    response = long_parts(response)
    events: list[Event] = [
        (f"response.{name}", {"response": _begun(response, status)}) for name, status in _BEGINNING
    ]
    if response["status"] in _UNFINISHED:
        events = events[: 2 if response["status"] == "queued" else 3]
    else:
        for index, item in enumerate(response["output"]):
            events += _item_events(index, item)
        events.append((f"response.{_LAST[response['status']]}", {"response": response}))
        if after >= len(events):
            raise api_bounds.STARTING_AFTER_LAST.refused(last=len(events) - 1)
    for number, (name, fields) in enumerate(events):
        if number > after:
            for piece in event_pieces(name, {"sequence_number": number, **fields}):
                yield number, piece


def _begun(response: Json, status: str) -> Json:
    nothing: Mapping[str, Any] = {"error": None, "incomplete_details": None, "output": [], "usage": None}
    return {**response, **nothing, "status": status}


def _item_events(index: int, item: Json) -> Iterator[Event]:
    place = {"item_id": item["id"], "output_index": index}
    empty = {"content": [], "summary": [], "arguments": ""}
    begun = {**item, "status": "in_progress", **{name: empty[name] for name in empty.keys() & item.keys()}}
    yield "response.output_item.added", {"output_index": index, "item": begun}
    if item["type"] == "function_call":
        said = {"name": item["name"], "arguments": item["arguments"]}
        yield "response.function_call_arguments.delta", {**place, "delta": item["arguments"]}
        yield "response.function_call_arguments.done", {**place, **said}
    else:
        yield from _part_events(place, item.get("content") or (), "content_index", "content_part", "")
        summary = item.get("summary") or ()
        yield from _part_events(place, summary, "summary_index", "reasoning_summary_part", "reasoning_")
    yield "response.output_item.done", {"output_index": index, "item": item}


def _part_events(
    place: Json, parts: Sequence[Json], index_name: str, part_name: str, prefix: str
) -> Iterator[Event]:
    for index, part in enumerate(parts):
        where = {**place, index_name: index}
        logprobs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
        empty = {**part, "text": "", **({"logprobs": []} if logprobs else {})}
        text_name = f"response.{prefix}{part['type']}"
        yield f"response.{part_name}.added", {**where, "part": empty}
        yield f"{text_name}.delta", {**where, "delta": part["text"], **logprobs}
        yield f"{text_name}.done", {**where, "text": part["text"], **logprobs}
        yield f"response.{part_name}.done", {**where, "part": part}
