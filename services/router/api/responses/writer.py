"""Events of a request -> responses of OpenAI's Responses API: whole ones and the events of a stream. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from services.router.api.answers.answer_blocks import AnswerBlock, AnswerBlocks, Step
from services.router.api.answers.answer_format import AnswerWriter
from services.router.api.answers.long_json import JSON_PIECE_BYTES, json_pieces, long_text
from services.router.api.answers.usage_cost import cost_fields
from services.router.api.responses.output_items import OutputItems
from slipstream.v1 import common_pb2, router_pb2

Json = dict[str, Any]

# The names of a block's part in events: its addition, a delta, the end of its text, its end.
_MESSAGE_EVENTS = ("content_part.added", "output_text.delta", "output_text.done", "content_part.done")
_REASONING_EVENTS = ("content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done")
_SUMMARY_EVENTS = (
    "reasoning_summary_part.added",
    "reasoning_summary_text.delta",
    "reasoning_summary_text.done",
    "reasoning_summary_part.done",
)


class ResponsesShape(msgspec.Struct, frozen=True):
    """How a response is written; `echo` are its fields that repeat the request."""

    key: str
    echo: Mapping[str, Any]
    has_summary: bool = False

    @property
    def response_id(self) -> str:
        """The id by which the client finds the response again."""
        return f"resp_{self.key}"


class ResponsesWriter(AnswerWriter):
    """One response as it grows. The numbers of its events grow from 0.

    `response` is the whole one, as soon as it is made, for `json_pieces`.
    """

    def __init__(self, started: router_pb2.Started, shape: ResponsesShape) -> None:
        self._started = started
        self._shape = shape
        self._answer = AnswerBlocks()
        self._items = OutputItems(shape.key, has_summary=shape.has_summary)
        self._n_events = 0
        self._ended: dict[int, str] = {}  # the status of each item whose end was written, by its index
        self.response: Json | None = None

    # ---- streaming, in server-sent events

    def opening(self) -> bytes:
        """The events before all others."""
        response = self._response("in_progress", [], None)
        created = self._event("response.created", {"response": response})
        return created + self._event("response.in_progress", {"response": response})

    def delta_event(self, delta: router_pb2.Delta) -> bytes:
        """The events of one piece of the answer."""
        steps = self._answer.add(delta)
        return b"".join([event for step in steps for event in self._step(step, "completed")])

    def before_closing(self, finished: router_pb2.Finished) -> Iterable[bytes]:
        """The ends of the last item, which repeat it."""
        for step in self._answer.end():
            yield from self._step(step, _status(finished))

    def closing(self, finished: router_pb2.Finished) -> Iterable[bytes]:
        """The last event, which repeats the answer. `failure` has its number where it is not sent."""
        self.response = self._whole(finished, in_pieces=True)
        return self._last_pieces(f"response.{_status(finished)}", self.response)

    def failure(self, error: Json) -> Iterable[bytes]:
        """The last event of a stream whose request failed, in pieces.

        It holds the output so far, with the items that have ended as the client has them.
        """
        output = [
            self._items.whole(block, self._ended.get(block.index, "incomplete"), in_pieces=True)
            for block in self._answer.blocks
        ]
        response = self._response("failed", output, None)
        response["error"] = error
        return self._last_pieces("response.failed", response)

    # ---- whole

    def add(self, delta: router_pb2.Delta) -> None:
        """Fold a piece into the whole answer."""
        self._answer.add(delta)

    def body(self, finished: router_pb2.Finished) -> Json:
        """The whole response, after all pieces were added."""
        self.response = self._whole(finished, in_pieces=False)
        return self.response

    # ---- common

    def _whole(self, finished: router_pb2.Finished, *, in_pieces: bool) -> Json:
        status, blocks = _status(finished), self._answer.blocks
        output = [self._items.whole(block, "completed", in_pieces=in_pieces) for block in blocks[:-1]]
        output += [self._items.whole(block, status, in_pieces=in_pieces) for block in blocks[-1:]]
        response = self._response(status, output, usage_object(finished.usage))
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        return response

    def _response(self, status: str, output: list[Json], usage: Json | None) -> Json:
        return response_object(
            self._shape.response_id,
            created_unix_s=int(self._started.created_unix_s),
            status=status,
            model=self._started.model,
            output=output,
            usage=usage,
            echo=self._shape.echo,
        )

    def _step(self, step: Step, status: str) -> Iterable[bytes]:
        action, block, text = step
        if action == "open":
            return [self._opened(block)]
        if action == "delta":
            return [self._grown(block, text)]
        return self._closed(block, status)

    def _opened(self, block: AnswerBlock) -> bytes:
        where = {"output_index": block.index, "item": self._items.begun(block)}
        opened = self._event("response.output_item.added", where)
        if block.kind == "call":
            return opened
        part = {**self._place(block), "part": self._items.empty_part(block)}
        return opened + self._event(f"response.{self._names(block)[0]}", part)

    def _grown(self, block: AnswerBlock, text: str) -> bytes:
        piece = {**self._place(block), "delta": text}
        if block.kind == "call":
            return self._event("response.function_call_arguments.delta", piece)
        if block.kind == "text":
            piece["logprobs"] = block.logprobs.next_json()
        return self._event(f"response.{self._names(block)[1]}", piece)

    def _closed(self, block: AnswerBlock, status: str) -> Iterable[bytes]:
        place = self._place(block)
        if block.kind == "call":
            arguments = {"name": block.name, "arguments": long_text(block.text)}
            yield from self._pieces("response.function_call_arguments.done", {**place, **arguments})
        else:
            _, _, text_done, part_done = self._names(block)
            part = self._items.part(block, in_pieces=True)
            said: Json = {"text": part["text"]}
            if block.kind == "text":
                said["logprobs"] = part["logprobs"]
            yield from self._pieces(f"response.{text_done}", {**place, **said})
            yield from self._pieces(f"response.{part_done}", {**place, "part": part})
        self._ended[block.index] = status
        item = {"output_index": block.index, "item": self._items.whole(block, status, in_pieces=True)}
        yield from self._pieces("response.output_item.done", item)

    def _names(self, block: AnswerBlock) -> tuple[str, str, str, str]:
        if block.kind == "text":
            return _MESSAGE_EVENTS
        return _SUMMARY_EVENTS if self._shape.has_summary else _REASONING_EVENTS

    def _place(self, block: AnswerBlock) -> Json:
        """Where an event belongs: its item, and the part of it."""
        place: Json = {"item_id": self._items.id_of(block), "output_index": block.index}
        if block.kind == "call":
            return place
        is_summary = block.kind == "reasoning" and self._shape.has_summary
        return place | {"summary_index" if is_summary else "content_index": 0}

    def _event(self, name: str, fields: Mapping[str, Any]) -> bytes:
        return b"".join(self._pieces(name, fields))

    def _last_pieces(self, name: str, response: Json) -> Iterable[bytes]:
        return event_pieces(name, {"sequence_number": self._n_events, "response": response})

    def _pieces(self, name: str, fields: Mapping[str, Any]) -> Iterable[bytes]:
        pieces = event_pieces(name, {"sequence_number": self._n_events, **fields})
        self._n_events += 1
        return pieces


def response_object(
    response_id: str,
    *,
    created_unix_s: int,
    status: str,
    model: str,
    output: list[Json],
    usage: Json | None,
    echo: Mapping[str, Any],
) -> Json:
    """A response. `echo` are its fields that repeat the request."""
    return {
        "id": response_id,
        "object": "response",
        "created_at": created_unix_s,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "model": model,
        "output": output,
        "usage": usage,
        **echo,
    }


def event_pieces(name: str, fields: Mapping[str, Any]) -> Iterator[bytes]:
    """One server-sent event, whose data repeats its name, in pieces where it is long."""
    data = b"event: %s\ndata: " % name.encode()
    for piece in json_pieces({"type": name, **fields}):
        if len(data) >= JSON_PIECE_BYTES:
            yield data
            data = b""
        data += piece
    yield data + b"\n\n"


def usage_object(usage: router_pb2.Usage) -> Json:
    """The tokens of an answer, and its cost."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        **cost_fields(usage),
    }


def _status(finished: router_pb2.Finished) -> str:
    is_cut = finished.finish_reason == common_pb2.FINISH_REASON_LENGTH
    return "incomplete" if is_cut else "completed"
