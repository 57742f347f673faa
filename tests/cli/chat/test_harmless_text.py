"""Text of others in a terminal."""

from __future__ import annotations

import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from slipstream.cli.chat.harmless_text import harmless, harmless_line


@given(st.text(st.characters(exclude_categories=[])), st.integers(0, 20))
def test_nothing_harmful_is_left_wherever_a_text_is_split(text: str, at: int) -> None:
    shown = harmless(text)
    left = {character for character in shown if unicodedata.category(character) in ("Cc", "Cs")}
    assert left <= {"\n", "\t"}
    assert not any(unicodedata.bidirectional(character) in BIDIRECTIONAL for character in shown)
    assert harmless(text[:at]) + harmless(text[at:]) == shown
    assert not set(harmless_line(text)) & {"\n", "\t"}


BIDIRECTIONAL = {"LRE", "RLE", "PDF", "LRO", "RLO", "LRI", "RLI", "FSI", "PDI"}


def test_other_text_stays() -> None:
    text = "Größe: 3\u2009m\n\t\u65e5\u672c \U0001f468\u200d\U0001f469"
    assert harmless(text) == text
