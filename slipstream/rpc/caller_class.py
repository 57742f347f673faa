"""The four classes of callers, and which of them a class of methods admits (docs/security.md)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class CallerClass(StrEnum):
    """Classes of callers and of methods. An operator may call everything, a peer nothing of a tenant."""

    PUBLIC = "public"  # no credential
    TENANT = "tenant"  # an API key
    PEER = "peer"  # another service of the cluster
    OPERATOR = "operator"

    def admits(self, caller: CallerClass) -> bool:
        """Whether a method of this class may be called by a caller of that class."""
        return self is CallerClass.PUBLIC or caller in (self, CallerClass.OPERATOR)


@dataclass(frozen=True, slots=True)
class CallerIdentity:
    """A caller: a class, a name, which is an instance's, a key's or empty, and the tenant of an API key."""

    kind: CallerClass
    name: str = ""
    tenant: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.name}".rstrip()


ANONYMOUS = CallerIdentity(CallerClass.PUBLIC)
