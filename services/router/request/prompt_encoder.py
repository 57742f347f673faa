"""Encodes a drafted prompt in steps of bounded length; one that runs is bounded by the context. Pure."""

from __future__ import annotations

from libs.text.tokenizer import MAX_ENCODE_CHARS
from services.router.request.prompt import Encoded, PromptDraft
from services.router.request.validation import prompt_field
from slipstream import bounds

# A step ends after so many tokens, or after one piece of the tokenizer, MAX_ENCODE_CHARS characters.
STEP_TOKENS = 32_768
# Longer excesses are not counted to their end, which would take seconds for 8 MiB.
_COUNTED_EXCESS_TOKENS = MAX_ENCODE_CHARS


class PromptEncoder:
    """The running encoding of one draft. One step at a time, each on any thread.

    `counts_all`: the prompt does not run, so that its length is of interest whatever the context.
    """

    def __init__(self, draft: PromptDraft, *, counts_all: bool = False) -> None:
        self._draft = draft
        self._counts_all = counts_all
        self._pieces = draft.encode_pieces()
        self._new_tokens = 0

    def step(self) -> Encoded | None:
        """Encode on; returns everything once it is encoded.

        Raises InvalidArgument, without encoding the rest, when a prompt that runs exceeds the context by far.
        """
        end = self._new_tokens + STEP_TOKENS
        try:
            while self._new_tokens < end:
                self._new_tokens = next(self._pieces)
                if not self._counts_all:
                    self._check_length()
        except StopIteration as encoded:
            result: Encoded = encoded.value
            return result
        return None

    def _check_length(self) -> None:
        tokens = self._draft.known_tokens + self._new_tokens
        most = self._draft.card.max_context_tokens
        if tokens > most + _COUNTED_EXCESS_TOKENS:
            raise bounds.PROMPT_TOKENS.refused(
                prompt_field(self._draft.request),
                prompt_tokens=f"at least {tokens}",
                max_context_tokens=most,
            )
