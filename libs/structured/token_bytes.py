"""The bytes of the model's tokens, and which of them have quotes or end an object."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence

from libs.text.tokenizer import Tokenizer

_QUOTE, _BACKSLASH = b'"\\'


class TokenBytes:
    """Tables of a vocabulary, made with their first use. Any thread may use it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._tables: _Tables | None = None

    def of(self, token: int) -> bytes | None:
        """The bytes of a token; None for a control token."""
        return self._tokenizer.token_bytes(token) if token < self._tokenizer.base_vocab_tokens else None

    def encode(self, text: str) -> list[int]:
        """The tokens of a text without control tokens."""
        return self._tokenizer.encode_text(text)

    def prepare(self) -> None:
        """Make the tables now, which takes a quarter of a second for 163,584 tokens."""
        self._made()

    @property
    def by_head(self) -> Mapping[bytes, Sequence[int]]:
        """The tokens that end a string, by their bytes before its end."""
        return self._made().by_head

    @property
    def quoting(self) -> Sequence[int]:
        """The tokens with a quote."""
        return self._made().quotes[1]

    @property
    def two_quotes(self) -> Sequence[int]:
        """The tokens with two quotes or more."""
        return self._made().quotes[2]

    @property
    def many_quotes(self) -> Sequence[int]:
        """The tokens with three quotes or more."""
        return self._made().quotes[3]

    @property
    def closing(self) -> Sequence[int]:
        """The tokens that may end an object."""
        return self._made().closing

    def _made(self) -> _Tables:
        with self._lock:
            if self._tables is None:
                self._tables = _Tables(self._tokenizer)
            return self._tables


class _Tables:
    def __init__(self, tokenizer: Tokenizer) -> None:
        by_head: defaultdict[bytes, list[int]] = defaultdict(list)
        self.by_head: Mapping[bytes, Sequence[int]] = by_head
        self.quotes: dict[int, list[int]] = {1: [], 2: [], 3: []}
        self.closing: list[int] = []
        for token in range(tokenizer.base_vocab_tokens):
            raw = tokenizer.token_bytes(token)
            if b"}" in raw:
                self.closing.append(token)
            n_quotes = raw.count(b'"')
            for least in range(1, min(n_quotes, 3) + 1):
                self.quotes[least].append(token)
            if n_quotes and (head := _head(raw)) is not None:
                by_head[head].append(token)


def starts_escaped(byte: int, is_escaped: bool) -> bool:
    """Whether the byte after this one of a string is escaped."""
    return byte == _BACKSLASH and not is_escaped


def _head(raw: bytes) -> bytes | None:
    """The text that a token adds to the string that it ends; None if it ends none."""
    is_escaped = False
    for i, byte in enumerate(raw):
        if byte == _QUOTE and not is_escaped:
            return raw[:i]
        is_escaped = starts_escaped(byte, is_escaped)
    return None
