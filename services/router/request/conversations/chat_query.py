"""A conversation as the token cache looks it up: its messages, rendered when the cache lacks them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from libs.text.chat_template import Segment
from services.router.request.conversations.message_key import MessageKey, split_messages

Render = Callable[[int, int | None], list[Segment]]


def count_messages(messages: Sequence[Mapping[str, Any]]) -> int:
    """Messages and their tool calls: each takes time to render and to encode, however short it is."""
    return len(messages) + sum([len(message.get("tool_calls") or ()) for message in messages])


class ChatQuery:
    """One request's conversation. `render` may run on another thread, while nothing else uses the query."""

    __slots__ = ("_keys", "_keys_from", "_render", "header", "kept_from", "messages", "tenant")

    def __init__(
        self,
        tenant: str,
        messages: Sequence[Mapping[str, Any]],
        render: Render,
        *,
        header: Sequence[Segment] = (),
        kept_from: int | None = None,
    ) -> None:
        """`header` is rendered before the messages; reasoning, from the message `kept_from` on.

        `render(n, end)` gives the segments of the messages from the n-th up to before `end`, or to the last.
        """
        self.tenant = tenant
        self.messages = messages
        self.header = split_messages(header)
        self.kept_from = len(messages) if kept_from is None else kept_from
        self._render = render
        self._keys: list[MessageKey] = []
        self._keys_from = len(messages)  # the first message whose key is known

    def render(self, first: int) -> None:
        """Render the messages from the `first` on, so that `keys` takes no time for them."""
        if first < self._keys_from:
            self._keys, self._keys_from = split_messages(self._render(first, None)), first

    def keys(self, first: int, end: int | None = None) -> list[MessageKey]:
        """The rendered forms of the messages from the `first` up to before `end`; each is rendered once."""
        if end is None:
            self.render(first)
        elif first < self._keys_from:
            return split_messages(self._render(first, end))
        return self._keys[first - self._keys_from : None if end is None else end - self._keys_from]
