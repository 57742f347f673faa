"""StopMatcher emits no part of a stop string and all other text."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.text.stop_matcher import StopMatcher

_TEXT = st.text("ab<|", max_size=40)
_STOPS = st.lists(st.text("ab<|", min_size=1, max_size=4), max_size=3)


def _shown(text: str, stops: list[str]) -> tuple[str, bool]:
    """The reference over the whole text: the match that ends first, the longest of those."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


@given(_TEXT, _STOPS, st.lists(st.integers(0, 40)), st.sampled_from(["", "<|a"]))
def test_any_chunking_of_the_text_emits_the_same(
    text: str, stops: list[str], cuts: list[int], marker: str
) -> None:
    matcher = StopMatcher(stops, marker=marker)
    borders = [0, *sorted(cut for cut in cuts if cut <= len(text)), len(text)]
    shown = ""
    for start, end in pairwise(borders):
        shown += matcher.feed(text[start:end])
        assert text.startswith(shown)
        if not matcher.stopped:
            rest = text[len(shown) : end]
            # Only text that can still become a stop string or the marker is held back.
            assert rest == "" or any(
                word.startswith(rest) or rest.startswith(word) for word in [*stops, marker]
            )
    shown += matcher.flush()
    assert (shown, matcher.stopped) == _shown(text, stops)


def test_the_match_that_ends_first_wins() -> None:
    for pieces in (["xabc"], list("xabc")):
        matcher = StopMatcher(["abc", "b"])
        assert "".join(matcher.feed(piece) for piece in pieces) + matcher.flush() == "xa"
    assert StopMatcher(["ab", "b"]).feed("xab") == "x"


@given(_TEXT, _STOPS)
def test_the_stop_string_that_was_found_is_named(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = "".join([matcher.feed(character) for character in text])
    assert matcher.stopped is bool(matcher.matched)
    if matcher.stopped:
        assert matcher.matched in stops
        assert text.startswith(shown + matcher.matched)


def test_the_marker_is_removed_only_at_the_end() -> None:
    matcher = StopMatcher(marker="<|x|>")
    assert matcher.feed("a<|x|>b<|x") == "a<|x|>b"
    assert matcher.feed("|> \n") == ""
    assert matcher.flush_before_marker() == ""
    assert matcher.feed("c<|") == "c"
    assert matcher.flush_before_marker() == "<|"
    assert matcher.feed("<|x|>" + " " * 17) == "<|x|>" + " " * 17


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher([""])
