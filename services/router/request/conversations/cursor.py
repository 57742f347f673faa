"""A position in the tree of conversations, which advances by rendered or by raw messages. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from libs.common.radix.tree import RadixCursor
from services.router.request.conversations.message_key import label_of
from services.router.request.conversations.message_node import ID_BYTES, MessageNode


class PromptCursor(RadixCursor[MessageNode]):
    """A position in a conversation. Its path begins with the root of a tenant's tree."""

    __slots__ = ()

    def follow(self, messages: Sequence[Any], first: int, *, kept_from: int) -> int:
        """Advance along the known raw messages of a request from its `first` on.

        Returns the index of the first unknown message. Reasoning is rendered from message `kept_from` on.
        """
        while first < len(messages):
            node = self.path[-1]
            if self.at < len(node.keys):
                n_equal = node.count_equal(self.at, messages, first, kept_from=kept_from)
                self.at, first = self.at + n_equal, first + n_equal
                if self.at < len(node.keys):
                    break
                continue
            label = label_of(messages[first])
            child = node.labeled.get(label) if label is not None else None
            if child is None or child.raw[0] != messages[first]:
                break
            self.path.append(child)
            self.at, first = 1, first + 1
        return first

    def parts(self) -> list[tuple[MessageNode, int]]:
        """The nodes below the root, each with the conversation's token at which its part of the path ends."""
        parts = [(node, node.ends[-1]) for node in self.path[1:]]
        if parts:
            last = self.path[-1]
            parts[-1] = (last, last.ends[self.at - 1])
        return parts

    def ids(self) -> list[tuple[bytearray, int]]:
        """The packed ids up to here, in parts, and how many bytes of each part belong to the path."""
        return [(node.ids, ID_BYTES * (end - node.begin)) for node, end in self.parts()]
