"""Limits of an API key or a tenant, as the file of API keys states them.

requests_per_minute = 60
tokens_per_minute = 100_000
concurrent_requests = 8
spend_per_day = 5.00              # in the currency of the router's price file
spend_per_month = 100
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.bounds import MAX_LIMIT, MAX_SPEND
from slipstream.metering.money import PICO, amount_text, parse_amount

COUNTED_LIMITS = ("requests_per_minute", "tokens_per_minute", "concurrent_requests")
SPEND_LIMITS = ("spend_per_day", "spend_per_month")
LIMIT_FIELDS = (*COUNTED_LIMITS, *SPEND_LIMITS)
_SPEND_DECIMALS = 6


@dataclass(frozen=True, slots=True)
class RateLimits:
    """The limits of one key or tenant; None = any amount. Spend is in 10^-12 of the currency."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None
    spend_per_day: int | None = None
    spend_per_month: int | None = None

    @property
    def limits_spend(self) -> bool:
        """Whether a limit needs prices."""
        return self.spend_per_day is not None or self.spend_per_month is not None

    def lines(self) -> list[str]:
        """The limits as lines of the file."""
        lines = []
        for name in LIMIT_FIELDS:
            value = getattr(self, name)
            if value is not None:
                lines.append(f"{name} = {amount_text(value) if name in SPEND_LIMITS else value}")
        return lines


NO_LIMITS = RateLimits()


def parse_limits(table: Mapping[str, Any]) -> RateLimits:
    """The limits among the fields of a table. Raises ValueError that names the field and no value."""
    found: dict[str, int] = {}
    for name in COUNTED_LIMITS:
        value = table.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_LIMIT:
            raise ValueError(f"{name} must be a whole number from 1 to {MAX_LIMIT}")
        found[name] = value
    for name in SPEND_LIMITS:
        value = table.get(name)
        if value is None:
            continue
        try:
            found[name] = parse_amount(value, decimals=_SPEND_DECIMALS)
        except ValueError as error:
            raise ValueError(f"{name} {error}") from None
        if not 0 < found[name] <= MAX_SPEND * PICO:
            raise ValueError(f"{name} must be above 0 and at most {MAX_SPEND}")
    return RateLimits(**found) if found else NO_LIMITS
