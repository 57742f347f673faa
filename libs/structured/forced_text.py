"""How much text a regular expression may force at once. Pure.

Where one text alone may follow, llguidance makes all of it with one mask. Nothing interrupts the call, which
takes 3.5 s of CPU time for `a{1000000}`. A class such as `[a-z]` forces no text, however often it repeats.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# About this much makes one mask take 0.1 s.
MAX_FORCED_CHARS = 50_000
FORCED_REASON = f"is too complex: it repeats text to more than {MAX_FORCED_CHARS} characters"
# Parts in which one of several characters may follow, then those that make groups and repetitions.
_PART = re.compile(
    r"(?P<choice>\\[pP](?:\{[^}]{0,40}\}|.)|\\[dDsSwWbBAz]|\[\^?\]?(?:\\.|\[:\w+:\]|[^\]\\]){0,4000}\]|[.^$])"
    r"|(?P<escape>\\[xuU](?:\{[0-9A-Fa-f]{1,8}\}|[0-9A-Fa-f]{2,8})|\\.)"
    r"|(?P<open>\((?:\?(?:P?<\w+>|[A-Za-z-]*:?))?)|(?P<close>\))|(?P<bar>\|)"
    r"|\{(?P<count>\d+)(?:,\d*)?\}\??|(?P<repeat>[*+?]\??)|(?P<text>.)",
    re.DOTALL,
)
_COUNT = re.compile(r"\{(\d+)")


@dataclass(slots=True)
class _RegexGroup:
    """The branch that is read, without its last part, and the most of the branches before."""

    branch: int = 0
    last: int = 0
    most: int = 0

    def add(self, n_chars: int) -> None:
        self.branch, self.last = _capped(self.branch + self.last), n_chars

    def end_branch(self) -> None:
        self.add(0)
        self.most, self.branch, self.last = max(self.most, self.branch), 0, 0


def forces_much(regex: str) -> bool:
    """Whether repetitions of text may force more than `MAX_FORCED_CHARS` characters, as far as is plain."""
    if not _repeats_much(regex):
        return False  # a long regular expression takes a second to read
    groups = [_RegexGroup()]
    for found in _PART.finditer(regex):
        group = groups[-1]
        match found.lastgroup:
            case "choice":
                group.add(0)
            case "escape" | "text":
                group.add(1)
            case "open":
                groups.append(_RegexGroup())
            case "bar":
                group.end_branch()
            case "close" if len(groups) > 1:
                group.end_branch()
                groups.pop()
                groups[-1].add(group.most)
            case "count":
                digits = found["count"]
                count = int(digits) if len(digits) < 10 else MAX_FORCED_CHARS + 1
                group.last = _capped(group.last * max(count, 1))
    groups[0].end_branch()
    return groups[0].most > MAX_FORCED_CHARS


def _repeats_much(regex: str) -> bool:
    """Whether its counts together would be enough, if each stood around all others."""
    times = 1
    for digits in _COUNT.findall(regex):
        times = _capped(times * max(int(digits[:9]), 1))
    return times > 1 and times * len(regex) > MAX_FORCED_CHARS


def _capped(n_chars: int) -> int:
    """Products of counts would have millions of digits."""
    return min(n_chars, MAX_FORCED_CHARS + 1)
