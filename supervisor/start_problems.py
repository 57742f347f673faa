"""The errors that processes log while their cluster starts: each once, however many processes log it.

    problems = StartProblems(say)
    problems("decode-0 | 2026-01-01T00:00:00.000Z ERROR decode/decode-0 x: decode-0 cannot start: no room")
    problems("decode-1 | 2026-01-01T00:00:00.100Z ERROR decode/decode-1 x: decode-1 cannot start: no room")

The second line is not passed on: all workers of a tier refuse a wrong model or flag alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable

_TIME = re.compile(r'^\S+Z |"(time|ts)":"[^"]*",?')


class StartProblems:
    """Passes on lines of the form `instance | line`, without repetitions until `started`."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._said: set[str] | None = set()

    def __call__(self, line: str) -> None:
        """Pass on a line, unless another process logged the same."""
        if self._said is not None:
            meaning = without_origin(line)
            if meaning in self._said:
                return
            self._said.add(meaning)
        self._say(line)

    def started(self) -> None:
        """From now on each line counts: it may be of another fault than the same line before."""
        self._said = None


def without_origin(line: str) -> str:
    """The line without its time and the names of its process. Pure."""
    instance, separator, text = line.partition(" | ")
    if not separator:
        return line
    name = re.escape(instance)
    return re.sub(rf"(?<![\w-])(\w+/)?{name}(?![\w-])", "", _TIME.sub("", text, count=1))
