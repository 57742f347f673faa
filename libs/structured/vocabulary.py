"""The model's vocabulary as llguidance sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llguidance import LLTokenizer

from libs.structured.token_bytes import TokenBytes
from libs.text.pretokens import PAT_STR
from libs.text.special_tokens import ANSWER_ENDS
from libs.text.tokenizer import Tokenizer

_STRUCTURE, _MAX_STRUCTURE = b'"}],:', 64


@dataclass(frozen=True, slots=True)
class GrammarVocabulary:
    """The trie of all tokens, and the ids that end an answer. Immutable; any thread may use it."""

    trie: LLTokenizer
    size: int
    end_ids: frozenset[int]
    special_ids: Mapping[str, int]
    tokens: TokenBytes
    byte_ids: Mapping[int, int]  # the token of each single byte
    # The first tokens that have only signs which close or separate parts of JSON.
    structure_ids: Sequence[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer, *, size: int | None = None) -> GrammarVocabulary:
        """Build the trie, which takes about a second for 163,584 tokens.

        `size` is that of the model's output. No mask allows an id that the tokenizer lacks.
        """
        size = tokenizer.vocab_size if size is None else size
        ranks = {tokenizer.token_bytes(i): i for i in range(tokenizer.base_vocab_tokens)}
        ends = [tokenizer.special_ids[name] for name in ANSWER_ENDS if name in tokenizer.special_ids]
        build: Any = LLTokenizer
        trie = build.from_tiktoken(
            encoder=ranks,
            special_tokens=dict(tokenizer.special_ids),
            pattern=PAT_STR,
            eos_token=ends,
            n_vocab=size,
            slices=None,
        )
        byte_ids = {raw[0]: token for raw, token in ranks.items() if len(raw) == 1}
        structure = [token for raw, token in ranks.items() if not raw.strip(_STRUCTURE)][:_MAX_STRUCTURE]
        tokens = TokenBytes(tokenizer)
        return cls(trie, size, frozenset(ends), tokenizer.special_ids, tokens, byte_ids, structure)
