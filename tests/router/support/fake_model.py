"""The scripted model of the fake workers: each token is a function of the prompt and the position."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slipstream.v1 import common_pb2

Answer = Callable[[Sequence[int], common_pb2.SamplingParams], Sequence[int]]


@dataclass
class FakeModel:
    """The token after a context is `answer(prompt)[n]`: a function of the prompt and the position."""

    answer: Answer
    stored: set[bytes] = field(default_factory=set)  # block hashes any prefill worker finds

    def token(self, prompt: Sequence[int], n: int, sampling: common_pb2.SamplingParams) -> int:
        answer = self.answer(prompt, sampling)
        return int(answer[n]) if n < len(answer) else int(answer[-1])

    def finish(self, token: int, n: int, sampling: common_pb2.SamplingParams) -> Any:
        """Return the finish reason if `token` is output number `n`, counted from 1."""
        if token in sampling.stop_token_ids and not sampling.ignore_eos:
            return common_pb2.FINISH_REASON_STOP
        return common_pb2.FINISH_REASON_LENGTH if n >= sampling.max_tokens else 0


def hashed_answer(ids: Sequence[int], *, end: int, length: int = 24) -> Answer:
    """Return an answer of `length` ids drawn from `ids` by a hash of prompt and seed, then `end`."""

    @functools.lru_cache(maxsize=64)  # a worker asks once a token
    def of_bytes(data: bytes) -> Sequence[int]:
        return [ids[byte % len(ids)] for byte in hashlib.shake_128(data).digest(length)] + [end]

    def answer(prompt: Sequence[int], sampling: common_pb2.SamplingParams) -> Sequence[int]:
        seed = sampling.seed if sampling.temperature else 0
        return of_bytes(np.asarray(prompt, "<u4").tobytes() + seed.to_bytes(8, "little"))

    return answer
