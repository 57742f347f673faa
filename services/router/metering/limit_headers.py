"""The headers of answers to limited keys about the limits, in the headers of two APIs. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from services.router.metering.limit_window import duration_text


@dataclass(frozen=True, slots=True)
class LimitState:
    """One limit, of `requests` or `tokens`, and when its window ends."""

    name: str
    limit: int
    remaining: int
    end_unix_s: int


def openai_headers(states: Iterable[LimitState], now_unix_s: float) -> dict[str, str]:
    """`x-ratelimit-*`: the reset is the time that is left, as OpenAI has it."""
    found: dict[str, str] = {}
    for state in states:
        found[f"x-ratelimit-limit-{state.name}"] = str(state.limit)
        found[f"x-ratelimit-remaining-{state.name}"] = str(state.remaining)
        found[f"x-ratelimit-reset-{state.name}"] = duration_text(max(0.0, state.end_unix_s - now_unix_s))
    return found


def anthropic_headers(states: Iterable[LimitState]) -> dict[str, str]:
    """`anthropic-ratelimit-*`: the reset is a point in time (RFC 3339)."""
    found: dict[str, str] = {}
    for state in states:
        end = datetime.fromtimestamp(state.end_unix_s, UTC)
        found[f"anthropic-ratelimit-{state.name}-limit"] = str(state.limit)
        found[f"anthropic-ratelimit-{state.name}-remaining"] = str(state.remaining)
        found[f"anthropic-ratelimit-{state.name}-reset"] = end.strftime("%Y-%m-%dT%H:%M:%SZ")
    return found
