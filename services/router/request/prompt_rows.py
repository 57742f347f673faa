"""Log probabilities of one prompt on their way to the client: each row once, in order, in small pieces.

Several attempts may compute the same rows: a retry begins the prompt again, and a hedge runs beside it. The
first row of each position counts.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from libs.common.block_hash import TokenArray
from libs.text.tokenizer import Tokenizer
from services.router.request.token_texts import write_token
from slipstream.errors import Internal
from slipstream.v1 import common_pb2, router_pb2

# Log probabilities in one event, which take about a millisecond to write.
_PIECE_LOGPROBS = 256


class PromptRows:
    """The rows that arrived and were not taken yet, as packed arrays. `taken`: rows that the client has."""

    def __init__(self, prompt: TokenArray, tokenizer: Tokenizer, *, taken: int = 0) -> None:
        self.taken = taken
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._n_received = max(taken, 1)  # the prompt's first token has no log probability
        self._waiting: deque[common_pb2.PromptLogprobs] = deque()

    @property
    def is_complete(self) -> bool:
        """Whether all rows have arrived."""
        return self._n_received == len(self._prompt)

    @property
    def is_waiting(self) -> bool:
        """Whether there is a piece to take."""
        return self.taken < self._n_received

    def add(self, piece: common_pb2.PromptLogprobs) -> None:
        """Take what a worker sent. Raises Internal where it does not continue the prompt."""
        n_rows, first = len(piece.logprobs) // 4, piece.first_position
        fits = len(piece.logprobs) == len(piece.ranks) == 4 * n_rows
        fits = fits and len(piece.top_ids) == len(piece.top_logprobs)
        fits = fits and len(piece.top_ids) % (4 * n_rows or 1) == 0
        if not fits or not 1 <= first <= self._n_received or first + n_rows > len(self._prompt):
            raise Internal(f"a worker sent {n_rows} prompt rows from {first}, after {self._n_received}")
        if first + n_rows > self._n_received:
            self._waiting.append(piece)
            self._n_received = first + n_rows

    def pop_event(self) -> router_pb2.GenerateEvent:
        """The next piece as an event. The prompt's first token comes alone."""
        event = router_pb2.GenerateEvent()
        if not self.taken:
            self._write(event.delta, 0)
            self.taken = 1
            return event
        piece = self._waiting[0]
        first, n_rows = piece.first_position, len(piece.logprobs) // 4
        top = len(piece.top_ids) // 4 // n_rows
        start = self.taken - first  # earlier rows of the piece were sent twice, or taken before
        stop = min(start + max(1, _PIECE_LOGPROBS // (1 + top)), n_rows)
        logprobs, ranks = np.frombuffer(piece.logprobs, "<f4"), np.frombuffer(piece.ranks, "<u4")
        ids = np.frombuffer(piece.top_ids, "<u4").reshape(n_rows, top)
        tops = np.frombuffer(piece.top_logprobs, "<f4").reshape(n_rows, top)
        rows = slice(start, stop)
        values = zip(logprobs[rows].tolist(), ranks[rows].tolist(), strict=True)
        likely = zip(ids[rows].tolist(), tops[rows].tolist(), strict=True)
        for position, (own, most) in enumerate(zip(values, likely, strict=True), self.taken):
            row = self._write(event.delta, position)
            row.logprob, row.rank = own
            for rank, (token, logprob) in enumerate(zip(*most, strict=True), 1):
                item = row.top.add(token_id=token, rank=rank)
                write_token(item, self._tokenizer, token)
                item.logprob = logprob
        self.taken = first + stop
        if stop == n_rows:
            self._waiting.popleft()
        return event

    def _write(self, delta: router_pb2.Delta, position: int) -> router_pb2.TextLogprob:
        token = int(self._prompt[position])
        row = delta.prompt_logprobs.add(token_id=token)
        write_token(row, self._tokenizer, token)
        return row
