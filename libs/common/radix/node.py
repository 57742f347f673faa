"""A node of a radix tree: the contract between the tree and its payload. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any, Self, TypeVar


class RadixNode(ABC):
    """Consecutive keys of a chain. A root has no keys, is in no budget and is never merged.

    `n_bytes` is what the budget counts for the node; TenantLru maintains it.
    """

    __slots__ = ("children", "keys", "n_bytes", "parent", "tenant")

    keys: Sequence[Any]

    def __init__(self, tenant: Hashable) -> None:
        self.tenant = tenant
        self.parent: Self | None = None
        self.children: dict[Hashable, Self] = {}
        self.n_bytes = 0

    @property
    def n_keys(self) -> int:
        """The number of keys."""
        return len(self.keys)

    @property
    def child_key(self) -> Hashable:
        """The node's key in its parent's `children`."""
        key: Hashable = self.keys[0]
        return key

    def link(self, child: Self) -> None:
        """Add a child, which has at least one key."""
        child.parent = self
        self.children[child.child_key] = child

    def unlink(self, child: Self) -> None:
        """Remove a child."""
        del self.children[child.child_key]

    @abstractmethod
    def size_bytes(self) -> int:
        """The approximate memory of the node with its payload."""

    @abstractmethod
    def move_head(self, head: Self, n_keys: int) -> None:
        """Move the first `n_keys` keys with their payload to `head`, an empty node."""

    @abstractmethod
    def absorb(self, child: Self) -> None:
        """Append the keys and payload of `child`, the only child. The child's own keys stay readable."""

    @abstractmethod
    def truncate(self, n_keys: int) -> None:
        """Drop all keys and payload after the first `n_keys`."""

    @abstractmethod
    def keys_after_eviction(self, excess_bytes: int) -> int:
        """The number of keys that stay when an eviction should free `excess_bytes`."""


NodeT = TypeVar("NodeT", bound=RadixNode)
