"""Which attempt at a request is the current one: duplicates, stale ones and late starts are refused. Pure.

An abort may overtake the start it belongs to, so aborted attempts are remembered too. Memory is
bounded: running attempts are always known, ended ones for the last `remembered` requests.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from slipstream.errors import Aborted, FailedPrecondition, InvalidArgument

MAX_REQUEST_ID_CHARS = 256


@dataclass(frozen=True, slots=True)
class AttemptKey:
    """(request id, attempt): the name of one try."""

    request_id: str
    attempt: int

    def __str__(self) -> str:
        return f"{self.request_id}#{self.attempt}"


@dataclass(slots=True)
class _Known:
    attempt: int
    epoch: int
    aborted_up_to: int = 0  # attempts 1..n were aborted, started or not


class AttemptRegistry:
    """Admits each (request id, attempt) once and only forwards in attempt and epoch."""

    def __init__(self, *, remembered: int = 8192) -> None:
        self._remembered = remembered
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._running: dict[str, set[int]] = {}

    @property
    def running(self) -> int:
        """Attempts admitted and not ended."""
        return sum(map(len, self._running.values()))

    def admit(self, request_id: str, attempt: int, epoch: int) -> list[AttemptKey]:
        """Take in a new attempt; returns older ones that still run and are superseded.

        Raises InvalidArgument for a missing id, FailedPrecondition for a repeated or older attempt or
        an older epoch, Aborted when the attempt was aborted before it came.
        """
        if not request_id or len(request_id) > MAX_REQUEST_ID_CHARS:
            raise InvalidArgument("attempt.request_id", f"must have 1 to {MAX_REQUEST_ID_CHARS} characters")
        if attempt < 1:
            raise InvalidArgument("attempt.attempt", "counts from 1")
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
        self._remember(request_id, attempt, epoch)
        return superseded

    def abort(self, request_id: str, attempt: int) -> list[AttemptKey]:
        """Bar this attempt and older ones; returns those that run. Idempotent; unknown ones are fine."""
        if not request_id or len(request_id) > MAX_REQUEST_ID_CHARS or attempt < 1:
            return []
        known = self._known.get(request_id) or self._remember(request_id, 0, 0)
        known.aborted_up_to = max(known.aborted_up_to, attempt)
        running = sorted(self._running.get(request_id, ()))
        return [AttemptKey(request_id, n) for n in running if n <= attempt]

    def end(self, key: AttemptKey) -> None:
        """The attempt holds nothing any more. Idempotent."""
        attempts = self._running.get(key.request_id)
        if attempts is not None:
            attempts.discard(key.attempt)
            if not attempts:
                del self._running[key.request_id]
        self._forget_surplus()

    def _remember(self, request_id: str, attempt: int, epoch: int) -> _Known:
        known = self._known.pop(request_id, None) or _Known(attempt, epoch)
        known.attempt, known.epoch = attempt, epoch
        self._known[request_id] = known
        self._forget_surplus()
        return known

    def _forget_surplus(self) -> None:
        surplus = len(self._known) - self._remembered
        if surplus <= 0:
            return
        ended = [request_id for request_id in self._known if request_id not in self._running]
        for request_id in ended[:surplus]:
            del self._known[request_id]
