"""A deterministic engine without torch, for tests of everything around the engine.

The fake runs the real bookkeeping (`PagedEngine`), with hashes in place of arithmetic. KV of position i is 16
bytes of a chain hash over tokens[: i + 1], stretched to `row_bytes`. The next token is a function of that
chain and, unless greedy, of the seed. Before the fake computes on a page it compares the page's bytes with
those of its history, and raises DataCorrupt when they differ. So it verifies every byte of a page from a
transport or a store.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from libs.common.block_hash import TokenArray
from libs.common.transport.registered_memory import PageAlignedMemory
from libs.engine.core.engine import PagedEngine
from libs.engine.sampling.settled_tokens import settle_tokens
from libs.engine.sampling.token_masks import compute_masks
from libs.engine.step.batch import ForwardBatch
from libs.engine.step.prompt_scores import PromptScores
from libs.engine.step.step_model import BAD_TOKEN, SequenceRows, StepResult
from libs.engine.step.stop_flag import StepAborted, StopFlag
from libs.engine.step.types import EngineInfo, FloatArray, SamplingParams, TokenLogprobs
from slipstream.errors import DataCorrupt

Allowed = npt.NDArray[np.signedinteger[Any]]
# Returns the token after a history in place of the hashed one, so that tests can script answers.
NextToken = Callable[[TokenArray, SamplingParams], int]
_MOST_GROWN_BLOCKS = 1024


@dataclass(frozen=True, slots=True)
class _FakeBlock:
    """Tokens of a block, 4 bytes each, with the state after each token and the bytes of the rows."""

    tokens: bytes = b""
    states: tuple[bytes, ...] = ()
    content: bytes = b""

    def extended(self, before: bytes, tokens: bytes, row_bytes: int) -> _FakeBlock:
        """The block of `tokens`, which begin with those of this one. `before`: the state before the block."""
        state, states = (self.states or (before,))[-1], list(self.states)
        for at in range(len(self.tokens), len(tokens), 4):
            state = hashlib.blake2b(state + tokens[at : at + 4], digest_size=16).digest()
            states.append(state)
        rows = (_stretch(state, row_bytes) for state in states[len(self.states) :])
        return _FakeBlock(tokens, tuple(states), self.content + b"".join(rows))


class FakeModel:
    """A StepModel of hashes. It calls `sleep` with the duration of each step, 0 by default."""

    def __init__(
        self,
        info: EngineInfo,
        *,
        next_token: NextToken | None = None,
        pace_s_per_token: float = 0.0,
        sleep: Callable[[float], None] = lambda _seconds: None,
    ) -> None:
        self.info = info
        n_bytes = info.n_pages * info.page_bytes
        host = PageAlignedMemory(n_bytes, field="kv_memory_bytes")
        self.memory = host.buffer[:n_bytes]
        self.memory_address = host.address
        self.page_parts = None
        self._row_bytes = info.page_bytes // info.block_tokens
        self._next_token = next_token
        self._pace_s_per_token = pace_s_per_token
        self._sleep = sleep
        self._grown: dict[bytes, _FakeBlock] = {}  # by the state before the block

    def run(self, batch: ForwardBatch, rows: Sequence[SequenceRows], stop: StopFlag) -> StepResult:
        chains = [self._compute(r, stop) for r in rows]
        self._sleep(self._pace_s_per_token * batch.n_rows)
        if stop.is_set:
            raise StepAborted
        tokens: list[int] = []
        allowed = _allowed_tokens(rows, self.info.vocab_size)
        for r, chain in zip(rows, chains, strict=True):
            for j in range(len(r.tokens) - r.n_sampled, len(r.tokens)):
                token = self.token_after(r.tokens[: j + 1], r.params, chain[j])
                tokens.append(_nearest(token, allowed.get(len(tokens)), r.params.banned_token_ids))
        settle_tokens(tokens, rows, lambda row, others: _nearest(tokens[row], np.array(others), ()))
        asked = [r.params.logprobs for r in rows for _ in range(r.n_sampled)]
        logprobs = [self._logprobs(token, n) for token, n in zip(tokens, asked, strict=True)]
        scores = _fake_scores(batch, self.info.vocab_size)
        if not batch.want_features:
            return StepResult(tokens, logprobs, None, scores)
        features = np.concatenate(
            [self._feature(state) for r, c in zip(rows, chains, strict=True) for state in c[-r.n_rows :]]
        )
        return StepResult(tokens, logprobs, features, scores)

    def close(self) -> None:
        """Do nothing: the model has no other process."""

    def token_after(self, history: TokenArray, params: SamplingParams, state: bytes | None = None) -> int:
        """The token that this model emits after `history`."""
        if self._next_token is not None:
            return self._next_token(history, params)
        state = state if state is not None else self._blocks(history)[-1].states[-1]
        seed = params.seed if params.temperature > 0 else 0
        digest = hashlib.blake2b(state + struct.pack("<Q", seed), digest_size=8).digest()
        return int.from_bytes(digest, "little") % self.info.vocab_size

    def page_content(self, tokens: TokenArray, block: int) -> bytes:
        """The bytes that a page with block `block` of `tokens` must have, for comparisons in tests."""
        return self._blocks(tokens)[block].content

    def _compute(self, r: SequenceRows, stop: StopFlag) -> list[bytes]:
        """Check the KV that the rows attend to and write theirs. Returns the chain over all tokens."""
        states: list[bytes] = []
        first = len(r.tokens) - r.n_rows
        for index, block in enumerate(self._blocks(r.tokens)):
            if stop.is_set:
                raise StepAborted
            n_known = max(0, first - len(states)) * self._row_bytes
            base = r.pages[index] * self.info.page_bytes
            known, new = block.content[:n_known], block.content[n_known:]
            if bytes(self.memory[base : base + len(known)]) != known:
                raise DataCorrupt(f"{r.seq_id}: the KV of block {index} is not that of its tokens")
            base += len(known)
            self.memory[base : base + len(new)] = new
            states += block.states
        return states

    def _blocks(self, tokens: TokenArray) -> list[_FakeBlock]:
        """The blocks of the history; the last one may be a part of a block."""
        blocks: list[_FakeBlock] = []
        state = b""
        for start in range(0, len(tokens), self.info.block_tokens):
            part = np.asarray(tokens[start : start + self.info.block_tokens], "<u4").tobytes()
            if len(part) == 4 * self.info.block_tokens:
                blocks.append(_whole_block(state, part, self._row_bytes))
            else:
                blocks.append(self._grown_block(state, part))
            state = blocks[-1].states[-1]
        return blocks

    def _grown_block(self, state: bytes, part: bytes) -> _FakeBlock:
        """A part of a block, made from that of the step before: a step mostly adds one token."""
        known = self._grown.get(state, _FakeBlock())
        if not part.startswith(known.tokens):
            known = _FakeBlock()
        grown = self._grown[state] = known.extended(state, part, self._row_bytes)
        if len(self._grown) > _MOST_GROWN_BLOCKS:
            del self._grown[next(iter(self._grown))]
        return grown

    def _feature(self, state: bytes) -> FloatArray:
        raw = np.frombuffer(_stretch(state, max(self.info.feature_width, 1)), dtype=np.uint8)
        return (raw.astype(np.float32) / 255.0)[None, :]

    def _logprobs(self, token: int, n: int | None) -> TokenLogprobs | None:
        if n is None:
            return None
        top = ((token + j) % self.info.vocab_size for j in range(n))
        return TokenLogprobs(-0.125, tuple((t, -0.125 - j) for j, t in enumerate(top)))


def _fake_scores(batch: ForwardBatch, vocab_size: int) -> PromptScores | None:
    """Scores that name their token: its log probability is -(1 + token / 1024), its rank the token's id."""
    tokens = batch.scored_tokens
    if not len(tokens):
        return None
    top = np.arange(batch.scored_top, dtype=np.int32)
    return PromptScores(
        0,
        (-1 - tokens / 1024).astype(np.float32),
        tokens,
        (tokens[:, None] + top) % vocab_size,
        np.broadcast_to(-0.125 - top, (len(tokens), len(top))).astype(np.float32),
    )


def _allowed_tokens(rows: Sequence[SequenceRows], vocab_size: int) -> dict[int, Allowed]:
    """The sorted tokens that structured output allows, by sampled row."""
    masks = compute_masks(rows, vocab_size)
    if masks is None:
        return {}
    bits = np.unpackbits(masks.masks.view(np.uint8), axis=1, bitorder="little")[:, :vocab_size]
    allowed = {row: np.flatnonzero(mask) for row, mask in zip(masks.masked, bits, strict=True)}
    for row, token in masks.banned:
        left = allowed.get(row, np.arange(vocab_size))
        allowed[row] = left[left != token]
    return allowed


def _nearest(token: int, allowed: Allowed | None, banned: Sequence[int]) -> int:
    """The token itself, or the next one in the vocabulary's order that is allowed."""
    if allowed is not None:
        if not len(allowed):
            return BAD_TOKEN
        return int(allowed[np.searchsorted(allowed, token) % len(allowed)])
    while token in banned:
        token -= 1
    return token


def build_fake_engine(
    *,
    n_pages: int = 256,
    block_tokens: int = 64,
    vocab_size: int = 1000,
    max_context_tokens: int = 8192,
    feature_width: int = 8,
    row_bytes: int = 64,
    max_batch: int = 32,
    step_tokens: int = 512,
    weights_digest: str = "fake",
    next_token: NextToken | None = None,
    pace_s_per_token: float = 0.0,
    sleep: Callable[[float], None] = lambda _seconds: None,
) -> PagedEngine:
    """An engine for tests. Equal arguments make engines whose KV and tokens are interchangeable."""
    info = EngineInfo(
        vocab_size=vocab_size,
        block_tokens=block_tokens,
        page_bytes=block_tokens * row_bytes,
        n_pages=n_pages,
        hidden_size=max(feature_width, 1),
        max_context_tokens=max_context_tokens,
        kv_dtype="float32",
        layout_version=1,
        weights_digest=weights_digest,
        drafter_digest="fake-head" if feature_width else "",
        feature_width=feature_width,
        max_batch=max_batch,
    )
    model = FakeModel(info, next_token=next_token, pace_s_per_token=pace_s_per_token, sleep=sleep)
    return PagedEngine(model, step_tokens=step_tokens)


def expected_tokens(
    engine: PagedEngine, prompt: Sequence[int], params: SamplingParams, *, n: int
) -> list[int]:
    """The next `n` tokens a fake engine must emit after `prompt`, by plain recomputation."""
    model = engine.model
    if not isinstance(model, FakeModel):
        raise TypeError("expected_tokens is for engines of build_fake_engine")
    history = list(prompt)
    for _ in range(n):
        history.append(model.token_after(np.array(history, dtype=np.uint32), params))
    return history[len(prompt) :]


@lru_cache(maxsize=4096)
def _whole_block(state: bytes, tokens: bytes, row_bytes: int) -> _FakeBlock:
    """The block after the state. Equal prefixes cost once."""
    return _FakeBlock().extended(state, tokens, row_bytes)


@lru_cache(maxsize=65536)
def _stretch(state: bytes, n_bytes: int) -> bytes:
    return hashlib.shake_128(state).digest(n_bytes)
