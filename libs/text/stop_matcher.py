"""Finds stop strings in streamed text, and holds back text that may become one. Pure."""

from __future__ import annotations

from collections.abc import Sequence

# The most white space that is held back after the marker.
_MAX_SPACE_CHARS = 16


class StopMatcher:
    """Takes text and returns the part that is safe to show.

    The result does not depend on how the text was split: the match that ends first wins, and of two that end
    together the longer one. The matcher also holds back `marker`, a spelling that the caller may remove from
    the end of the text (see `flush_before_marker`).
    """

    __slots__ = ("_held", "_marker", "_stops", "matched", "stopped")

    def __init__(self, stops: Sequence[str] = (), *, marker: str = "") -> None:
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self._stops = tuple(dict.fromkeys(stops)) if stops else ()
        self._marker = marker
        self._held = ""
        self.stopped = False
        self.matched = ""  # the stop string that was found

    def feed(self, text: str) -> str:
        """Add text; returns the text that is safe to show now. After a stop string it is empty."""
        if self.stopped or not text:
            return ""
        if not (self._held or self._stops or (self._marker and self._marker[0] in text)):
            return text
        text = self._held + text
        found = self._first_stop(text)
        if found is not None:
            start, self.matched = found
            self.stopped = True
            self._held = ""
            return text[:start]
        safe = len(text) - self._hold(text)
        self._held = text[safe:]
        return text[:safe]

    @property
    def held_chars(self) -> int:
        """How many characters are held back."""
        return len(self._held)

    def flush(self) -> str:
        """End the text; returns the part that was held back."""
        held, self._held = self._held, ""
        return held

    def flush_before_marker(self) -> str:
        """Flush without the marker, and white space after it, at the end of the text."""
        held = self.flush()
        bare = held.rstrip()
        return bare.removesuffix(self._marker) if self._marker and bare.endswith(self._marker) else held

    def _first_stop(self, text: str) -> tuple[int, str] | None:
        """Where the first stop string in `text` starts, and the string."""
        starts = ((text.find(stop), stop) for stop in self._stops)
        spans = [(start + len(stop), start, stop) for start, stop in starts if start >= 0]
        return min(spans)[1:] if spans else None

    def _hold(self, text: str) -> int:
        """How many characters at the end of `text` could still be part of a stop string or the marker."""
        hold = max((_overlap(text, stop) for stop in self._stops), default=0)
        if self._marker:
            bare = text.rstrip()
            space = len(text) - len(bare)
            if space <= _MAX_SPACE_CHARS and bare.endswith(self._marker):
                return max(hold, len(self._marker) + space)
            hold = max(hold, _overlap(text, self._marker))
        return hold


def _overlap(text: str, stop: str) -> int:
    """The length of the longest suffix of `text` that is a proper prefix of `stop`."""
    # `find` makes no slice for most texts, which lack even the first character.
    start = text.find(stop[0], max(len(text) - len(stop) + 1, 0))
    while start >= 0:
        if stop.startswith(text[start:]):
            return len(text) - start
        start = text.find(stop[0], start + 1)
    return 0
