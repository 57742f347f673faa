"""Log probabilities of a prompt in OpenAI's shape (`logprobs` of an echo) and in vLLM's. Pure."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

import msgspec

from services.router.api.answers.answer_format import Json
from services.router.api.answers.logprob_rows import CompletionRows, LogprobBudget
from slipstream.v1 import router_pb2

Rows = Sequence[router_pb2.TextLogprob]
_DECODER = codecs.getincrementaldecoder("utf-8")


class PromptLogprobsWriter:
    """One prompt's rows as they grow.

    `echo_top`: how many likely tokens each row of `logprobs` names; None: the prompt is not there. `top`: the
    same of `prompt_logprobs`.
    """

    def __init__(self, *, echo_top: int | None, top: int | None) -> None:
        self._echo_top = echo_top
        self._top = top
        # A character may have several tokens, so offsets count what is complete before each.
        self._decoder = _DECODER("replace")
        self._n_chars = 0
        self._logprobs = CompletionRows(LogprobBudget())
        # JSON already: all rows together take long to encode.
        self._rows: list[msgspec.Raw] = []

    def next_logprobs(self, items: Rows) -> Json | None:
        """The next rows in OpenAI's shape. The first token has null in place of its log probabilities."""
        if self._echo_top is None:
            return None
        offsets = []
        for item in items:
            offsets.append(self._n_chars)
            self._n_chars += len(self._decoder.decode(item.token_bytes))
        return {
            "tokens": [item.token for item in items],
            "token_logprobs": [item.logprob if item.rank else None for item in items],
            "top_logprobs": [self._likely(item) if item.rank else None for item in items],
            "text_offset": offsets,
        }

    def next_rows(self, items: Rows) -> list[Json | None] | None:
        """The next rows in vLLM's shape: each by the ids of its token and of the most likely ones."""
        if self._top is None:
            return None
        return [_by_id(item, self._top) if item.rank else None for item in items]

    def add(self, items: Rows) -> None:
        """Fold the next rows into the whole."""
        self.keep(self.next_logprobs(items), self.next_rows(items))

    def keep(self, logprobs: Json | None, rows: Sequence[Json | None] | None) -> None:
        """Fold the next rows, in both shapes, into the whole."""
        if logprobs is not None:
            self._logprobs.add(logprobs)
        self._rows += [msgspec.Raw(msgspec.json.encode(row)) for row in rows or ()]

    def whole_logprobs(self, answer: Json | None) -> Json | None:
        """The log probabilities of the prompt and then of the answer."""
        if self._echo_top is None:
            return answer
        prompt = self._logprobs.lists
        if not answer or not prompt:
            return answer or prompt or None
        return {name: [*rows, *answer[name]] for name, rows in prompt.items()}

    @property
    def rows(self) -> list[Any] | None:
        """All rows in vLLM's shape; None where they are not asked for."""
        return None if self._top is None else self._rows

    def _likely(self, item: router_pb2.TextLogprob) -> Json:
        return {top.token: top.logprob for top in reversed(item.top[: self._echo_top])}


def _by_id(item: router_pb2.TextLogprob, top: int) -> Json:
    return {
        str(each.token_id): {"logprob": each.logprob, "rank": each.rank, "decoded_token": each.token}
        for each in (item, *item.top[:top])
    }
