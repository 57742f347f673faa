"""The requests that wait, by class and in each class by tenant. Pure; times in milliseconds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from services.router.admission.fair_queue import FairQueue
from services.router.admission.types import AdmissionLimits, AdmissionRequest, Priority


@dataclass(slots=True)
class WaitingRequest:
    """A request that waits from `since_ms` until `until_ms` at most."""

    ask: AdmissionRequest
    since_ms: float
    until_ms: float
    preemptions: int = 0


@dataclass(slots=True)
class _Class:
    queue: FairQueue
    waiting: dict[str, WaitingRequest] = field(default_factory=dict)  # by arrival


class ClassQueues:
    """One queue for each class."""

    def __init__(self, limits: AdmissionLimits) -> None:
        self._limits = limits
        self._classes = {priority: _Class(FairQueue(limits.tenant_weights)) for priority in Priority}
        self._where: dict[str, Priority] = {}
        self._served_promoted = False

    def __len__(self) -> int:
        return len(self._where)

    def __iter__(self) -> Iterator[WaitingRequest]:
        return (waiting for each in self._classes.values() for waiting in each.waiting.values())

    def push(self, waiting: WaitingRequest) -> None:
        """Add a request."""
        ask = waiting.ask
        of_class = self._classes[ask.priority]
        of_class.queue.push(ask.tenant, ask.key, ask.cost_tokens)
        of_class.waiting[ask.key] = waiting
        self._where[ask.key] = ask.priority

    def remove(self, key: str) -> WaitingRequest | None:
        """Take a request out, which costs its tenant nothing. None for an unknown key."""
        priority = self._where.pop(key, None)
        if priority is None:
            return None
        self._classes[priority].queue.remove(key)
        return self._classes[priority].waiting.pop(key)

    def pop_head(self, key: str) -> WaitingRequest:
        """Take a head of a queue that begins; its tenant pays for it."""
        priority = self._where.pop(key)
        self._served_promoted = self.has_above(priority)
        self._classes[priority].queue.pop(key)
        return self._classes[priority].waiting.pop(key)

    def charge(self, ask: AdmissionRequest, tokens: float) -> None:
        """Correct what the tenant paid for a request."""
        self._classes[ask.priority].queue.charge(ask.tenant, tokens)

    def count(self, lowest: Priority) -> int:
        """How many requests of this class and those above wait."""
        if not self._where:  # as for nearly all requests
            return 0
        return sum(len(c.waiting) for p, c in self._classes.items() if p <= lowest)

    def has_above(self, priority: Priority) -> bool:
        """Whether a request of a higher class waits."""
        return any(c.waiting for p, c in self._classes.items() if p < priority)

    def is_full(self, priority: Priority) -> bool:
        """Whether the class's queue has no room."""
        return len(self._classes[priority].waiting) >= self._limits.max_waiting[priority]

    def newest_of_longest(self, ask: AdmissionRequest) -> str | None:
        """The newest request of the tenant with the most in the queue, if that is another tenant."""
        queue = self._classes[ask.priority].queue
        longest = queue.longest()
        if longest is None or longest[2] < queue.waiting_of(ask.tenant) + 2:
            return None
        return longest[1]

    def next_head(self, now_ms: float) -> WaitingRequest | None:
        """The request to serve: of the highest class, or every other time of one that has waited long."""
        waiting = [priority for priority in Priority if self._classes[priority].waiting]
        if not waiting:
            return None
        priority = waiting[0]
        if not self._served_promoted:
            for lower in reversed(waiting[1:]):
                oldest = next(iter(self._classes[lower].waiting.values()))
                if now_ms - oldest.since_ms >= self._limits.promote_ms[lower]:
                    priority = lower
                    break
        head = self._classes[priority].queue.peek()
        assert head is not None
        return self._classes[priority].waiting[head]

    def heads(self) -> list[WaitingRequest]:
        """The first request of each tenant of the highest class that waits, in order."""
        for of_class in self._classes.values():
            if of_class.waiting:
                return [of_class.waiting[key] for key in of_class.queue.heads()]
        return []
