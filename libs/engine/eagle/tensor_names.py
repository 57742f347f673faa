"""The names of a draft head's tensors, which some files store below `model.`."""

from __future__ import annotations

from collections.abc import Iterable

from libs.engine.model.checkpoint import Checkpoint
from libs.engine.model.shards import CheckpointError


class TensorNames:
    """Finds the names of one head, and knows which of its tensors some part uses."""

    def __init__(self, head: Checkpoint, known: Iterable[str]) -> None:
        """`known`: tensors that parts elsewhere use."""
        self._head = head
        self._known = set(known)

    def find(self, name: str) -> str:
        """`name` or `model.name`, whichever is stored; `name` when neither is."""
        self._known.add(name)
        prefixed = f"model.{name}"
        return prefixed if prefixed in self._head and name not in self._head else name

    def refuse_others(self, *, but: str | None = None) -> None:
        """Raise CheckpointError for a stored tensor that no part of the head uses. `but`: an end of names."""
        for name in sorted(self._head.names()):
            is_meant = but is not None and name.endswith(but)
            if name.removeprefix("model.") not in self._known and not is_meant:
                raise CheckpointError(name, "unexpected: the head's config.json implies no such tensor")
