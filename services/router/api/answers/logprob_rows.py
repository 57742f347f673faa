"""Log probabilities of an answer as JSON, a row for each token, made as the tokens arrive. Pure.

A long answer has megabytes of them, and some streams repeat them in several events. To encode them at the end
holds the event loop for seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from services.router.api.answers.answer_format import Json
from services.router.api.answers.long_json import JSON_PIECE_BYTES, LongJson
from slipstream import bounds
from slipstream.bound import Size
from slipstream.v1 import router_pb2


class LogprobBudget:
    """Counts the bytes of all rows that one answer keeps, by a row of the table of bounds."""

    def __init__(self, bound: Size | None = None) -> None:
        self._bound = bound or bounds.ANSWER_ROWS
        self._n_bytes = 0

    def spend(self, n_bytes: int) -> None:
        """Count so many more. Raises InvalidArgument for too many."""
        self._n_bytes += n_bytes
        self._bound.check(self._n_bytes)


class LogprobRows:
    """The rows of a text in the shape of chat completions and responses."""

    def __init__(self, budget: LogprobBudget) -> None:
        self._budget = budget
        # All rows with commas between them, in pieces of full size and the one that grows.
        self._full: list[bytes] = []
        self._last = bytearray()
        self._next = (0, 0)  # where `next_json` goes on: a piece, and a place in it

    def __bool__(self) -> bool:
        return bool(self._last or self._full)

    def add(self, items: Iterable[router_pb2.TextLogprob]) -> None:
        """Add the rows of the next tokens. Raises InvalidArgument for too many bytes."""
        rows = [msgspec.json.encode(row_object(item)) for item in items]
        self._budget.spend(sum(map(len, rows)))
        for row in rows:
            if self:
                self._last += b","
            self._last += row
            if len(self._last) >= JSON_PIECE_BYTES:
                self._full.append(bytes(self._last))
                self._last.clear()

    def next_json(self) -> msgspec.Raw:
        """A list of the rows since the last call."""
        index, begin = self._next
        self._next = (len(self._full), len(self._last))
        first, *others = [*self._full[index:], self._last]
        rows = b"".join([first[begin:], *others]).removeprefix(b",")
        return msgspec.Raw(b"[" + rows + b"]")

    def json(self) -> msgspec.Raw:
        """A list of all rows."""
        return msgspec.Raw(b"".join(self._pieces()))

    def long_json(self) -> LongJson:
        """A list of all rows for `json_pieces`. No row is added while it is used."""
        return LongJson(self._pieces)

    def _pieces(self) -> Sequence[bytes]:
        return [b"[", *self._full, bytes(self._last), b"]"]


class CompletionRows:
    """The rows of a prompt or a text in the shape of completions. Objects among them are JSON already.

    `lists` is empty while there are none.
    """

    def __init__(self, budget: LogprobBudget) -> None:
        self.lists: Json = {}
        self._budget = budget

    def add(self, logprobs: Mapping[str, Sequence[Any]]) -> None:
        """Add the lists of the next tokens. Raises InvalidArgument for too many bytes."""
        likely = [msgspec.Raw(msgspec.json.encode(item)) for item in logprobs["top_logprobs"]]
        self._budget.spend(sum([len(memoryview(item)) for item in likely]))
        for name in logprobs:
            self.lists.setdefault(name, []).extend(likely if name == "top_logprobs" else logprobs[name])


def row_object(item: router_pb2.TextLogprob) -> Json:
    """The row of one token, with the most likely ones."""
    return {**_token(item), "top_logprobs": [_token(top) for top in item.top]}


def _token(item: router_pb2.TextLogprob) -> Json:
    return {"token": item.token, "logprob": item.logprob, "bytes": list(item.token_bytes)}
