"""Text of others for a terminal: nothing in it can move the cursor, change colours or hide other text. Pure.

The replacement is character by character, so a sequence that is split over two pieces is harmless too.
"""

from __future__ import annotations

_KEPT = "\n\t"
# C0 and DEL have pictures; C1 has none. The last ones reverse the order of the text that follows.
_PICTURES = {code: 0x2400 + code for code in range(0x20) if chr(code) not in _KEPT} | {0x7F: 0x2421}
_C1 = range(0x80, 0xA0)
_REORDERING = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_SEPARATORS = (0x2028, 0x2029)
_SURROGATES = range(0xD800, 0xE000)
_TABLE = _PICTURES | dict.fromkeys((*_C1, *_REORDERING, *_SEPARATORS, *_SURROGATES), 0xFFFD)


def harmless(text: str) -> str:
    """The text with visible characters in place of control characters; line ends and tabs stay."""
    return text.translate(_TABLE)


def harmless_line(text: str) -> str:
    """The text like `harmless`, on one line."""
    return harmless(text.replace("\n", " ").replace("\t", " "))
