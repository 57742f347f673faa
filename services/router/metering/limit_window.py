"""The kinds of limits, and the windows of time in which they count. Pure; times are Unix seconds, UTC."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum

_MINUTE_S = 60
_DAY_S = 86_400


class LimitKind(StrEnum):
    """The quantity that a limit counts. The values are the fields of the file of API keys."""

    REQUESTS = "requests_per_minute"
    TOKENS = "tokens_per_minute"
    CONCURRENT = "concurrent_requests"
    SPEND_DAY = "spend_per_day"
    SPEND_MONTH = "spend_per_month"


@dataclass(frozen=True, slots=True)
class LimitWindow:
    """From `start_unix_s` to before `end_unix_s`. The window of a limit of concurrent requests never ends."""

    start_unix_s: int
    end_unix_s: int | None


ALWAYS = LimitWindow(0, None)


def window_of(kind: LimitKind, now_unix_s: float) -> LimitWindow:
    """The window of a kind at this time: a minute, a day or a month of the calendar."""
    if kind is LimitKind.CONCURRENT:
        return ALWAYS
    now = int(now_unix_s)
    if kind is LimitKind.SPEND_MONTH:
        first = datetime.fromtimestamp(now, UTC).replace(day=1, hour=0, minute=0, second=0)
        following = (first + timedelta(days=32)).replace(day=1)
        return LimitWindow(int(first.timestamp()), int(following.timestamp()))
    length_s = _DAY_S if kind is LimitKind.SPEND_DAY else _MINUTE_S
    start = now - now % length_s
    return LimitWindow(start, start + length_s)


def duration_text(left_s: float) -> str:
    """A time as OpenAI's headers have it: `120ms`, `6s`, `1m30s`, `3h0m0s`."""
    if left_s < 1:
        return f"{max(0, round(left_s * 1e3))}ms"
    minutes, seconds = divmod(round(left_s), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes}m{seconds}s"
    return f"{minutes}m{seconds}s" if minutes else f"{seconds}s"
