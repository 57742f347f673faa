"""Which sources of KV are worth asking now. Pure; time is given, in seconds.

    well     everybody may ask
    silent   it failed, or did not answer in time: nobody asks, a probe in the background does
    on trial it answers probes again: one restore tries it, the others do without until that one is over

So a source that is dead, stopped or cut off costs those who were asking when it fell silent, and after that
one restore now and then while it answers probes but gives nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.rpc.backoff import LONGEST_PAUSE_S

FIRST_SILENCE_S = 1.0
# As long as any retry waits: with the link of the bytes healed it is in use again within HEAL_S.
MAX_SILENCE_S = LONGEST_PAUSE_S
# A source that no request has named for this long is removed, and its probes end.
FORGET_AFTER_S = 120.0


@dataclass(slots=True)
class _Silence:
    until_s: float
    lasts_s: float
    asked_s: float  # when a restore last wanted it
    answers: bool = False
    on_trial: bool = False


class SourceBreaker:
    """The sources of one worker, by endpoint; only those that are not well take memory."""

    def __init__(self) -> None:
        self._silent: dict[str, _Silence] = {}

    def __contains__(self, endpoint: str) -> bool:
        """Whether the source is not well."""
        return endpoint in self._silent

    def may_ask(self, endpoint: str, *, now_s: float) -> bool:
        """Whether to ask the source now. After True the caller reports the outcome."""
        silence = self._silent.get(endpoint)
        if silence is None:
            return True
        silence.asked_s = now_s
        if not silence.answers or silence.on_trial or now_s < silence.until_s:
            return False
        silence.on_trial = True
        return True

    def worked(self, endpoint: str) -> None:
        """The source delivered its blocks, or has none."""
        self._silent.pop(endpoint, None)

    def end_trial(self, endpoint: str) -> None:
        """The restore that tried the source ended without an outcome. Only for a restore on trial."""
        silence = self._silent.get(endpoint)
        if silence is not None:
            silence.on_trial = False

    def unanswered(self, endpoint: str, *, now_s: float) -> None:
        """The source did not answer in time. It may only be slow: the first answered probe makes it well, or
        lets another restore try it."""
        silence = self._silent.get(endpoint)
        if silence is None:
            self._silent[endpoint] = _Silence(now_s, 0.0, now_s)
        elif silence.on_trial:
            silence.on_trial = silence.answers = False
            silence.until_s = now_s + silence.lasts_s

    def failed(self, endpoint: str, *, now_s: float) -> None:
        """The source failed, or delivered none of the blocks that it pinned."""
        before = self._silent.get(endpoint)
        if before is not None and before.lasts_s and not before.on_trial:
            return  # this restore began before the source fell silent
        lasts_s = max(FIRST_SILENCE_S, min(MAX_SILENCE_S, 2 * before.lasts_s if before is not None else 0.0))
        self._silent[endpoint] = _Silence(now_s + lasts_s, lasts_s, now_s)

    def answered(self, endpoint: str) -> None:
        """A probe was answered."""
        silence = self._silent.get(endpoint)
        if silence is None:
            return
        silence.answers = True
        if not silence.lasts_s:
            del self._silent[endpoint]

    def probe_at_s(self, endpoint: str, *, now_s: float) -> float | None:
        """When to probe the source next; None when it answers, or no request has named it for long."""
        silence = self._silent.get(endpoint)
        if silence is None or silence.answers:
            return None
        if now_s - silence.asked_s > FORGET_AFTER_S:
            del self._silent[endpoint]
            return None
        return max(now_s, silence.until_s)
