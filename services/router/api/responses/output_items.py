"""The items of a response's output, and the parts that they are made of. Pure."""

from __future__ import annotations

from typing import Any

from services.router.api.answers.answer_blocks import AnswerBlock
from services.router.api.answers.long_json import long_text

Json = dict[str, Any]

_PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc"}


class OutputItems:
    """Makes items of blocks. `key` is the part of the response's id that makes those of its items unique.

    `has_summary`: reasoning is shown as its summary, which is where clients that asked for one look.
    """

    def __init__(self, key: str, *, has_summary: bool) -> None:
        self._key = key
        self.has_summary = has_summary

    def id_of(self, block: AnswerBlock) -> str:
        """The id of the block's item."""
        return f"{_PREFIXES[block.kind]}_{self._key}_{block.index}"

    def begun(self, block: AnswerBlock) -> Json:
        """The item as it is when it opens: without content."""
        item: Json = {"id": self.id_of(block), "type": "message", "status": "in_progress"}
        match block.kind:
            case "text":
                return item | {"role": "assistant", "content": []}
            case "reasoning":
                return item | {"type": "reasoning", "summary": [], "content": []}
            case "call":
                names = {"call_id": block.call_id, "name": block.name}
                return item | {"type": "function_call", **names, "arguments": ""}

    def whole(self, block: AnswerBlock, status: str, *, in_pieces: bool) -> Json:
        """The item as it is at its end, or as far as it is. `in_pieces`: its long parts are `LongJson`."""
        item = self.begun(block) | {"status": status}
        match block.kind:
            case "text":
                item["content"] = [self.part(block, in_pieces=in_pieces)]
            case "reasoning":
                name = "summary" if self.has_summary else "content"
                item[name] = [self.part(block, in_pieces=in_pieces)]
            case "call":
                item["arguments"] = long_text(block.text) if in_pieces else block.text
        return item

    def part(self, block: AnswerBlock, *, in_pieces: bool) -> Json:
        """The one part of a message or of reasoning."""
        part, rows = self.empty_part(block), block.logprobs
        part["text"] = long_text(block.text) if in_pieces else block.text
        if block.kind == "text":
            part["logprobs"] = rows.long_json() if in_pieces else rows.json()
        return part

    def empty_part(self, block: AnswerBlock) -> Json:
        """The part as it is when it opens."""
        if block.kind == "reasoning":
            return {"type": "summary_text" if self.has_summary else "reasoning_text", "text": ""}
        return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
