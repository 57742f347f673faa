"""Records the attempts at each request, and refuses duplicate, stale and late attempts. Pure.

An abort may overtake the start of its attempt, so the registry also records aborted attempts. Its memory is
bounded: it keeps all running attempts, and the ended attempts of the last `max_requests` requests.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from itertools import islice

from slipstream.errors import Aborted, FailedPrecondition, InvalidArgument

MAX_REQUEST_ID_CHARS = 256
_RANDOM_DIGITS = 12  # services/router/execution/request_manager.py


@dataclass(frozen=True, slots=True)
class AttemptKey:
    """The identity of one attempt at a request."""

    request_id: str
    attempt: int

    def __str__(self) -> str:
        return f"{self.request_id}#{self.attempt}"


def client_request_id(request_id: str) -> str:
    """The id that the client knows. Routers append a point and 12 random digits."""
    name, _, digits = request_id.rpartition(".")
    return name if name and len(digits) == _RANDOM_DIGITS else request_id


@dataclass(slots=True)
class _Request:
    attempt: int
    epoch: int
    aborted_up_to: int = 0  # attempts 1..n were aborted, whether started or not


class AttemptRegistry:
    """Admits each attempt once, with attempt numbers and epochs of a request in ascending order."""

    def __init__(self, *, max_requests: int = 8192) -> None:
        self._max_requests = max_requests
        self._known: OrderedDict[str, _Request] = OrderedDict()
        self._running: dict[str, set[int]] = {}

    @property
    def running(self) -> int:
        """The number of attempts admitted and not ended."""
        return sum(map(len, self._running.values()))

    def admit(self, request_id: str, attempt: int, epoch: int) -> list[AttemptKey]:
        """Admit a new attempt; returns the older running attempts that it supersedes.

        Raises InvalidArgument for a missing id, FailedPrecondition for a repeated or older attempt or
        an older epoch, Aborted when the abort of the attempt arrived first.
        """
        if not request_id or len(request_id) > MAX_REQUEST_ID_CHARS:
            raise InvalidArgument("attempt.request_id", f"must have 1 to {MAX_REQUEST_ID_CHARS} characters")
        if attempt < 1:
            raise InvalidArgument("attempt.attempt", "must be at least 1")
        known = self._known.get(request_id)
        if known is not None:
            if epoch < known.epoch:
                raise FailedPrecondition(f"epoch {epoch} of {request_id} is older than {known.epoch}")
            if attempt <= known.aborted_up_to:
                raise Aborted(f"attempt {attempt} of {request_id} was aborted")
            if attempt == known.attempt:
                raise FailedPrecondition(f"attempt {attempt} of {request_id} was started before")
            if attempt < known.attempt:
                raise FailedPrecondition(f"attempt {attempt} of {request_id} is older than {known.attempt}")
        superseded = [AttemptKey(request_id, n) for n in sorted(self._running.get(request_id, ()))]
        self._running.setdefault(request_id, set()).add(attempt)
        self._record(request_id, attempt, epoch)
        return superseded

    def abort(self, request_id: str, attempt: int) -> list[AttemptKey]:
        """Refuse this attempt and older ones from now on; returns those that run. Idempotent."""
        if not request_id or len(request_id) > MAX_REQUEST_ID_CHARS or attempt < 1:
            return []
        known = self._known.get(request_id) or self._record(request_id, 0, 0)
        known.aborted_up_to = max(known.aborted_up_to, attempt)
        running = sorted(self._running.get(request_id, ()))
        return [AttemptKey(request_id, n) for n in running if n <= attempt]

    def end(self, key: AttemptKey) -> None:
        """Record that the attempt has released everything. Idempotent."""
        attempts = self._running.get(key.request_id)
        if attempts is not None:
            attempts.discard(key.attempt)
            if not attempts:
                del self._running[key.request_id]
        self._remove_surplus()

    def _record(self, request_id: str, attempt: int, epoch: int) -> _Request:
        known = self._known.pop(request_id, None) or _Request(attempt, epoch)
        known.attempt, known.epoch = attempt, epoch
        self._known[request_id] = known
        self._remove_surplus()
        return known

    def _remove_surplus(self) -> None:
        surplus = len(self._known) - self._max_requests
        if surplus <= 0:
            return
        ended = (request_id for request_id in self._known if request_id not in self._running)
        for request_id in list(islice(ended, surplus)):
            del self._known[request_id]
