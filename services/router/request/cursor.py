"""A place in remembered conversations, and the ways on from there. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from services.router.request.message_key import MessageKey, label_of
from services.router.request.message_run import ID_BYTES, MessageRun


@dataclass(slots=True)
class PromptCursor:
    """After `at` messages of the last of these runs, which lead there from a tenant's root."""

    runs: list[MessageRun]
    at: int = 0

    def step(self, key: MessageKey) -> bool:
        """Go on by a message, if it is known here."""
        run = self.runs[-1]
        if self.at < len(run.keys):
            if run.keys[self.at] != key:
                return False
            self.at += 1
            return True
        child = run.children.get(key)
        if child is None:
            return False
        self.runs.append(child)
        self.at = 1
        return True

    @property
    def goes_on(self) -> bool:
        """Whether any message is known here."""
        run = self.runs[-1]
        return self.at < len(run.keys) or bool(run.children)

    def steps(self, messages: Sequence[MessageKey]) -> int:
        """Go on by rendered messages, as far as they are known; returns by how many."""
        for n, key in enumerate(messages):
            if not self.step(key):
                return n
        return len(messages)

    def follow(self, messages: Sequence[Any], first: int, *, kept_from: int) -> int:
        """Go on by messages of a request from its `first` on, as far as they are known by name; returns up
        to which."""
        while first < len(messages):
            run = self.runs[-1]
            if self.at < len(run.keys):
                same = run.same(self.at, messages, first, kept_from=kept_from)
                self.at, first = self.at + same, first + same
                if self.at < len(run.keys):
                    break
                continue
            label = label_of(messages[first])
            child = run.named.get(label) if label is not None else None
            if child is None or child.names[0] != messages[first]:
                break
            self.runs.append(child)
            self.at, first = 1, first + 1
        return first

    def parts(self) -> list[tuple[MessageRun, int]]:
        """The runs with messages, and up to which token of the conversation each is wanted."""
        parts = [(run, run.ends[-1]) for run in self.runs[1:]]
        if parts:
            last = self.runs[-1]
            parts[-1] = (last, last.ends[self.at - 1])
        return parts

    def ids(self) -> list[tuple[bytearray, int]]:
        """The ids up to here, in parts, of so many bytes each."""
        return [(run.ids, ID_BYTES * (end - run.begin)) for run, end in self.parts()]
