"""An answer as blocks of reasoning, text and tool calls, for APIs whose streams open and close each. Pure.

At most one block is open. A piece of another kind, or of another call, closes it and opens the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from libs.common import api_bounds
from libs.text.special_tokens import THINK_END
from services.router.api.answers.logprob_rows import LogprobBudget, LogprobRows
from slipstream.v1 import router_pb2

BlockKind = Literal["reasoning", "text", "call"]


class AnswerBlock:
    """One block; `index` is its place in the answer. `call_id` and `name` are those of a tool call."""

    __slots__ = ("call_id", "index", "is_open", "kind", "logprobs", "name", "pieces")

    def __init__(
        self, kind: BlockKind, index: int, budget: LogprobBudget, *, call_id: str = "", name: str = ""
    ) -> None:
        self.kind = kind
        self.index = index
        self.call_id = call_id
        self.name = name
        self.is_open = True
        self.pieces: list[str] = []
        self.logprobs = LogprobRows(budget)

    @property
    def text(self) -> str:
        """All of the block so far: for a call, its arguments."""
        return "".join(self.pieces)


Step: TypeAlias = tuple[Literal["open", "delta", "close"], AnswerBlock, str]


class AnswerBlocks:
    """The growing answer. `add` and `end` return what changed: openings, deltas with their text, closings."""

    def __init__(self) -> None:
        self.blocks: list[AnswerBlock] = []
        self._budget = LogprobBudget(api_bounds.RESPONSE_ROWS)
        self._call = -1  # the index of the open call, among the calls
        # Of tokens whose text is held back: they belong to the next piece of text.
        self._early_logprobs: list[router_pb2.TextLogprob] = []

    def add(self, delta: router_pb2.Delta) -> Sequence[Step]:
        """Take one piece of the answer: its reasoning, then its text, then its calls."""
        steps: list[Step] = []
        if delta.reasoning:
            self._grow(steps, "reasoning", delta.reasoning)
        if delta.text:
            self._grow(steps, "text", delta.text)
            self.blocks[-1].logprobs.add([*self._early_logprobs, *delta.logprobs])
            self._early_logprobs.clear()
        elif delta.logprobs and not delta.reasoning and not (self.blocks and self.blocks[-1].kind != "text"):
            self._early_logprobs += [item for item in delta.logprobs if item.token != THINK_END]
        for piece in delta.tool_calls:
            self._grow_call(steps, piece)
        return steps

    def end(self) -> Sequence[Step]:
        """Close the last block."""
        steps: list[Step] = []
        self._close(steps)
        return steps

    def _grow(self, steps: list[Step], kind: BlockKind, text: str) -> None:
        block = self.blocks[-1] if self.blocks else None
        if block is None or not block.is_open or block.kind != kind:
            block = self._open(steps, kind)
        block.pieces.append(text)
        steps.append(("delta", block, text))

    def _grow_call(self, steps: list[Step], piece: router_pb2.ToolCallDelta) -> None:
        block = self.blocks[-1] if self.blocks else None
        if block is None or not block.is_open or block.kind != "call" or self._call != piece.index:
            block = self._open(steps, "call", call_id=piece.id, name=piece.name)
            self._call = piece.index
        if piece.arguments:
            block.pieces.append(piece.arguments)
            steps.append(("delta", block, piece.arguments))

    def _open(self, steps: list[Step], kind: BlockKind, *, call_id: str = "", name: str = "") -> AnswerBlock:
        self._close(steps)
        block = AnswerBlock(kind, len(self.blocks), self._budget, call_id=call_id, name=name)
        self.blocks.append(block)
        steps.append(("open", block, ""))
        return block

    def _close(self, steps: list[Step]) -> None:
        if self.blocks and self.blocks[-1].is_open:
            self.blocks[-1].is_open = False
            self._early_logprobs.clear()
            steps.append(("close", self.blocks[-1], ""))
