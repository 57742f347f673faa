"""Kimi's pre-tokenisation: the pattern that splits text before byte-pair merges.

Merges never cross the border of a pre-token. tiktoken runs the pattern in Rust. For training, `pretokens`
runs it with Python's `regex` (version-1 behaviour, which supports `&&` set intersection).
"""

from __future__ import annotations

from collections.abc import Iterator

import regex  # type: ignore[import-untyped]

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"

PAT_STR = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIX}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIX}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)

_PATTERN = regex.compile(PAT_STR, flags=regex.V1)


def pretokens(text: str) -> Iterator[str]:
    """The pre-tokens of `text` in order; together they are `text`."""
    for match in _PATTERN.finditer(text):
        yield match.group()
