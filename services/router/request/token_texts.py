"""The texts of token ids: of those that a client sends, made off the event loop, and of single tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from functools import partial
from typing import TypeVar

from libs.common.service_bounds import MAX_DECODED_TOKENS
from libs.text.tokenizer import Tokenizer
from services.router.admission.fair_threads import FairThreads
from services.router.request.model_card import ModelCard
from services.router.request.token_ids import are_below
from services.router.request.types import Caller
from slipstream import bounds
from slipstream.errors import InvalidArgument
from slipstream.v1 import router_pb2

T = TypeVar("T")

# Fewer take less than a millisecond.
_INLINE_TOKENS = 1024


class TokenTexts:
    """Decodes for the tenants of a router, who take turns."""

    def __init__(self, card: ModelCard, threads: FairThreads) -> None:
        self._card = card
        self._threads = threads

    async def text(self, ids: Sequence[int], caller: Caller, *, field: str) -> str:
        """The text of the ids, with the names of control tokens.

        Raises InvalidArgument, Overloaded, DeadlineExceeded.
        """
        check_count(ids, field)
        return await self._run(lambda: self._decode(ids, field), ids, caller)

    async def of_prompt(self, ids: Sequence[int], *, tenant: str) -> str:
        """The text of the ids of an admitted request's prompt, whose values were checked."""
        piece = partial(self._card.tokenizer.decode, ids, keep_special=True)
        if len(ids) <= _INLINE_TOKENS:
            return piece()
        return await self._threads.run(tenant, piece)

    async def each(self, ids: Sequence[int], caller: Caller) -> list[str]:
        """The text of each id of a prompt. Raises Overloaded, DeadlineExceeded."""
        return await self._run(
            lambda: [self._card.tokenizer.decode([i], keep_special=True) for i in ids], ids, caller
        )

    async def _run(self, piece: Callable[[], T], ids: Sequence[int], caller: Caller) -> T:
        if len(ids) <= _INLINE_TOKENS:
            return piece()
        return await self._threads.run_in_time(caller.tenant, piece, caller.deadline_s)

    def _decode(self, ids: Sequence[int], field: str) -> str:
        if not are_below(ids, self._card.vocab_size):
            raise bounds.PROMPT_IDS.refused(field, last=self._card.vocab_size - 1)
        return self._card.tokenizer.decode(ids, keep_special=True)


def write_token(into: router_pb2.TextLogprob, tokenizer: Tokenizer, token: int) -> None:
    """Set the text and the bytes of a token, for a control token those of its name.

    A token beyond the tokenizer's has neither: a model may have more rows.
    """
    name, raw = tokenizer.special_name(token), b""
    if name is not None:
        raw = name.encode()
    elif token < tokenizer.vocab_size:
        raw = tokenizer.token_bytes(token)
    into.token, into.token_bytes = raw.decode("utf-8", "replace"), raw


def check_count(ids: Sized, field: str) -> None:
    """Raises InvalidArgument for more ids than one call decodes."""
    if len(ids) > MAX_DECODED_TOKENS:
        raise InvalidArgument(field, f"must have at most {MAX_DECODED_TOKENS} token ids, not {len(ids)}")
