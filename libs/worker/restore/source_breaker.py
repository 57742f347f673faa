"""The circuit breaker of KV sources. Pure.

    closed      restores use the source
    open        it failed, or did not answer in time: restores skip it, and probes run in the background
    half-open   it answers probes again: one restore tries it, and others skip it until that one has ended

A dead, stopped or unreachable source costs only the restores that use it when it fails. After that, it costs
a single restore now and then while it answers probes but delivers nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.rpc.backoff import LONGEST_PAUSE_S

FIRST_SILENCE_S = 1.0
# The longest pause of any retry, so that a source is in use again within HEAL_S after its link works.
MAX_SILENCE_S = LONGEST_PAUSE_S
# A source that no restore wanted for this long is removed, and its probes end.
FORGET_AFTER_S = 120.0


@dataclass(slots=True)
class _OpenSource:
    until_s: float  # no trial before this time
    pause_s: float  # 0 after a time-out alone
    wanted_s: float  # when a restore last wanted it
    answers_probes: bool = False
    has_trial: bool = False


class SourceBreaker:
    """The state of one worker's sources, by endpoint. A closed source takes no memory."""

    def __init__(self) -> None:
        self._open: dict[str, _OpenSource] = {}

    def __contains__(self, endpoint: str) -> bool:
        """Whether the source is open or half-open."""
        return endpoint in self._open

    def may_ask(self, endpoint: str, *, now_s: float) -> bool:
        """Whether a restore may use the source now. After True the caller records the outcome."""
        source = self._open.get(endpoint)
        if source is None:
            return True
        source.wanted_s = now_s
        if not source.answers_probes or source.has_trial or now_s < source.until_s:
            return False
        source.has_trial = True
        return True

    def record_success(self, endpoint: str) -> None:
        """Close the breaker: the source delivered its blocks, or has none."""
        self._open.pop(endpoint, None)

    def end_trial(self, endpoint: str) -> None:
        """End the trial of a half-open source without an outcome."""
        source = self._open.get(endpoint)
        if source is not None:
            source.has_trial = False

    def record_timeout(self, endpoint: str, *, now_s: float) -> None:
        """Open the breaker: the source, which may only be slow, did not answer in time.

        The first answered probe closes it again, or allows another trial after a failed one.
        """
        source = self._open.get(endpoint)
        if source is None:
            self._open[endpoint] = _OpenSource(now_s, 0.0, now_s)
        elif source.has_trial:
            source.has_trial = source.answers_probes = False
            source.until_s = now_s + source.pause_s

    def record_failure(self, endpoint: str, *, now_s: float) -> None:
        """Open the breaker: the source failed, or delivered none of the blocks that it pinned."""
        before = self._open.get(endpoint)
        if before is not None and before.pause_s and not before.has_trial:
            return  # this restore began before the breaker opened
        pause_s = max(FIRST_SILENCE_S, min(MAX_SILENCE_S, 2 * before.pause_s if before is not None else 0.0))
        self._open[endpoint] = _OpenSource(now_s + pause_s, pause_s, now_s)

    def record_probe(self, endpoint: str) -> None:
        """Record that the source answered a probe."""
        source = self._open.get(endpoint)
        if source is None:
            return
        source.answers_probes = True
        if not source.pause_s:
            del self._open[endpoint]

    def next_probe_s(self, endpoint: str, *, now_s: float) -> float | None:
        """When to probe the source next; None if it answers probes, or no restore has wanted it for long."""
        source = self._open.get(endpoint)
        if source is None or source.answers_probes:
            return None
        if now_s - source.wanted_s > FORGET_AFTER_S:
            del self._open[endpoint]
            return None
        return max(now_s, source.until_s)
