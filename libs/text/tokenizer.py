"""Kimi's tokenizer: tiktoken byte-pair ranks with 256 special ids after them.

Text is never encoded as a special id; the chat template writes control tokens as ids. Long input is split as
by Kimi's tokenizer (400,000 characters, then runs of 25,000 characters that are all space or all not),
because the borders change the ids.
"""

from __future__ import annotations

import base64
import binascii
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import tiktoken

from libs.common.worker_bounds import MAX_TOKENIZER_FILE_BYTES
from libs.text.model_files import read_object_file
from libs.text.pretokens import PAT_STR
from libs.text.special_tokens import special_ids
from slipstream.credentials.bounded_file import read_bounded

MAX_ENCODE_CHARS = 400_000
MAX_RUN_CHARS = 25_000
# The cache of encoded short texts, such as roles, which recur often.
_SHORT_CHARS = 16
_SHORT_TEXTS = 1024

_SPACES = re.compile(r"\s+")
_NO_SPACES = re.compile(r"\S+")
_SURROGATE = re.compile("[\ud800-\udfff]")


class Tokenizer:
    """Text to ids and back. Immutable; safe to share between threads."""

    def __init__(self, ranks: Mapping[bytes, int], special: Mapping[str, int]) -> None:
        self.base_vocab_tokens: int = len(ranks)
        self.vocab_size: int = len(ranks) + len(special)
        self.special_ids: Mapping[str, int] = MappingProxyType(dict(special))
        self._special_names: Mapping[int, str] = {i: name for name, i in special.items()}
        self._bytes: list[bytes] = [b""] * self.vocab_size
        for token, rank in ranks.items():
            self._bytes[rank] = token
        # tiktoken gets no special tokens, so no input can make it produce one.
        self._encoding = tiktoken.Encoding(
            "kimi", pat_str=PAT_STR, mergeable_ranks=dict(ranks), special_tokens={}
        )
        self._encode_short = functools.lru_cache(_SHORT_TEXTS)(self._encode)

    @classmethod
    def from_dir(cls, model_dir: Path) -> Tokenizer:
        """Read `tiktoken.model` and `tokenizer_config.json`. Raises OSError, ValueError."""
        ranks = _read_ranks(model_dir / "tiktoken.model")
        path = model_dir / "tokenizer_config.json"
        added = read_object_file(path).get("added_tokens_decoder")
        try:
            names = {int(i): str(entry["content"]) for i, entry in added.items()} if added else None
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: added_tokens_decoder must map ids to objects with content") from error
        return cls(ranks, special_ids(len(ranks), names))

    def special_id(self, name: str) -> int:
        """The id of a special token. Raises KeyError if the vocabulary lacks it."""
        return self.special_ids[name]

    def special_name(self, token_id: int) -> str | None:
        """The name of a special id, None for an ordinary one."""
        return self._special_names.get(token_id)

    def encode_text(self, text: str) -> list[int]:
        """Ids of `text`, all below `base_vocab_tokens`. A lone surrogate is encoded as U+FFFD."""
        if len(text) <= _SHORT_CHARS:
            return list(self._encode_short(text))
        return self._encode(text)

    def encode_pieces(self, text: str) -> Iterator[list[int]]:
        """The ids of `encode_text` in parts, each of at most MAX_ENCODE_CHARS characters."""
        if len(text) <= _SHORT_CHARS:
            yield list(self._encode_short(text))
        else:
            yield from map(self._encode_piece, split_long(text))

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in map(self._encode_piece, split_long(text)):
            ids += piece
        return ids

    def _encode_piece(self, text: str) -> list[int]:
        if not text.isascii():
            text = _SURROGATE.sub("\ufffd", text)
        return self._encoding.encode_ordinary(text)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one id; a special id has none. Raises ValueError outside of the vocabulary."""
        if not 0 <= token_id < self.vocab_size:
            raise ValueError(f"token id {token_id} is outside of [0, {self.vocab_size})")
        return self._bytes[token_id]

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """The bytes of `ids`; special ids are left out. Raises ValueError outside of the vocabulary."""
        table = self._bytes
        if len(ids) and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            self.token_bytes(min(ids) if min(ids) < 0 else max(ids))  # raises
        return b"".join([table[token_id] for token_id in ids])

    def decode_plain(self, ids: Sequence[int]) -> bytes | None:
        """The bytes of `ids`; None if one of them is a special id or outside of the vocabulary."""
        table, end = self._bytes, self.base_vocab_tokens
        if len(ids) == 1:  # the most frequent case
            (token_id,) = ids
            return table[token_id] if 0 <= token_id < end else None
        if len(ids) and not (min(ids) >= 0 and max(ids) < end):
            return None
        return b"".join([table[token_id] for token_id in ids])

    def decode(self, ids: Sequence[int], *, keep_special: bool = False) -> str:
        """The text of `ids`, malformed UTF-8 as U+FFFD; `keep_special` writes special tokens by name."""
        if not keep_special:
            return self.decode_bytes(ids).decode("utf-8", "replace")
        parts: list[str] = []
        pending: list[bytes] = []  # adding to one bytes object would copy it for each token
        for token_id in ids:
            name = self.special_name(token_id)
            if name is None:
                pending.append(self.token_bytes(token_id))
            else:
                parts += [b"".join(pending).decode("utf-8", "replace"), name]
                pending = []
        return "".join(parts) + b"".join(pending).decode("utf-8", "replace")


def split_long(text: str) -> Iterator[str]:
    """Split into pieces of at most 400,000 characters, and again after each 25,000 characters of one run.

    The characters of a run are all white space or all not (`str.isspace`). Takes linear time.
    """
    for offset in range(0, len(text), MAX_ENCODE_CHARS):
        window = text[offset : offset + MAX_ENCODE_CHARS]
        start = 0
        for run_start, run_end in _long_runs(window):
            for cut in range(run_start + MAX_RUN_CHARS, run_end, MAX_RUN_CHARS):
                yield window[start:cut]
                start = cut
        yield window[start:]


def _long_runs(window: str) -> Iterator[tuple[int, int]]:
    """Yield [start, end) of the runs longer than 25,000 characters.

    Each of them contains an index that is a multiple of 25,000, so only runs at those indices are measured.
    """
    end = 0
    for probe in range(MAX_RUN_CHARS, len(window), MAX_RUN_CHARS):
        if probe < end:
            continue
        space = window[probe].isspace()
        start = probe
        while start > end and window[start - 1].isspace() == space:
            start -= 1
        run = (_SPACES if space else _NO_SPACES).match(window, probe)
        assert run is not None
        end = run.end()
        if end - start > MAX_RUN_CHARS:
            yield start, end


def _read_ranks(path: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    lines = read_bounded(path, max_bytes=MAX_TOKENIZER_FILE_BYTES).splitlines()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise ValueError(f"{path}:{number}: expected a base64 token and its rank") from error
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError(f"{path}: ranks must be 0 to {len(ranks) - 1}, each once")
    missing = [value for value in range(256) if bytes([value]) not in ranks]
    if missing:
        raise ValueError(f"{path}: no token for the single bytes {missing[:8]}")
    return ranks
