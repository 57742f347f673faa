"""Rates and latencies of a router over the last seconds, from two states of its counters. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

from libs.common.telemetry.counters import Counters

WINDOW_S = 10.0
_REQUESTS = "slipstream_requests_total"
_PROMPT, _CACHED = "slipstream_prompt_tokens_total", "slipstream_cached_tokens_total"
_TOTALS = (_REQUESTS, _PROMPT, _CACHED)
_TTFT, _ITL = "slipstream_time_to_first_token_seconds", "slipstream_inter_token_latency_seconds"


class CounterState(msgspec.Struct, frozen=True, gc=False):
    """The counters that the rates need, at one moment."""

    at_s: float
    requests: float = 0
    prompt_tokens: float = 0
    cached_tokens: float = 0
    ttft: tuple[int, ...] = ()  # values of each bucket alone
    itl: tuple[int, ...] = ()
    ttft_ends_s: tuple[float, ...] = ()
    itl_ends_s: tuple[float, ...] = ()


def counter_state(counters: Counters, *, at_s: float) -> CounterState:
    """The state of the counters now."""
    totals = dict.fromkeys(_TOTALS, 0.0)
    for name, _, value in counters.values():
        if name in totals:
            totals[name] += value
    found = {name: histogram for name, _, histogram in counters.histograms() if name in (_TTFT, _ITL)}
    ttft, itl = found.get(_TTFT), found.get(_ITL)
    return CounterState(
        at_s,
        requests=totals[_REQUESTS],
        prompt_tokens=totals[_PROMPT],
        cached_tokens=totals[_CACHED],
        ttft=tuple(ttft.counts) if ttft else (),
        itl=tuple(itl.counts) if itl else (),
        ttft_ends_s=ttft.ends if ttft else (),
        itl_ends_s=itl.ends if itl else (),
    )


def rates_json(before: CounterState, after: CounterState, *, time_ms: float) -> dict[str, Any]:
    """The rates between two states. A latency without a value, and a share of nothing, is null."""
    elapsed_s = max(after.at_s - before.at_s, 1e-9)
    ttft, itl = difference(before.ttft, after.ttft), difference(before.itl, after.itl)
    prompt_tokens = after.prompt_tokens - before.prompt_tokens
    # Cached tokens of a prompt that decode computes count at its end, and the prompt at its first token.
    cached_tokens = min(after.cached_tokens - before.cached_tokens, prompt_tokens)
    return {
        "time_ms": time_ms,
        "requests_per_s": round((after.requests - before.requests) / elapsed_s, 3),
        "tokens_per_s": round((sum(ttft) + sum(itl)) / elapsed_s, 3),
        "ttft_ms_p50": quantile_ms(ttft, after.ttft_ends_s, 0.5),
        "ttft_ms_p99": quantile_ms(ttft, after.ttft_ends_s, 0.99),
        "itl_ms_p50": quantile_ms(itl, after.itl_ends_s, 0.5),
        "itl_ms_p99": quantile_ms(itl, after.itl_ends_s, 0.99),
        "cached_share": round(cached_tokens / prompt_tokens, 4) if prompt_tokens > 0 else None,
    }


def difference(before: Sequence[int], after: Sequence[int]) -> list[int]:
    """The values of each bucket that came between two states."""
    return [now - then for now, then in zip(after, before or [0] * len(after), strict=True)]


def quantile_ms(counts: Sequence[int], ends_s: Sequence[float], share: float) -> float | None:
    """The quantile, interpolated within its bucket as Prometheus does; None without a value."""
    rank = share * sum(counts)
    if not rank:
        return None
    below = 0
    for index, count in enumerate(counts[: len(ends_s)]):
        if below + count >= rank:
            begin_s = ends_s[index - 1] if index else 0.0
            return round((begin_s + (ends_s[index] - begin_s) * (rank - below) / count) * 1e3, 3)
        below += count
    return round(ends_s[-1] * 1e3, 3)


class RateWindow:
    """The states of the last WINDOW_S seconds, added while someone reads."""

    def __init__(self) -> None:
        self._states: deque[CounterState] = deque()

    def rates(self, now: CounterState, *, time_ms: float) -> dict[str, Any]:
        """The rates from the oldest state of the window to now, which joins the window."""
        while len(self._states) > 1 and self._states[0].at_s < now.at_s - WINDOW_S:
            self._states.popleft()
        before = self._states[0] if self._states else now
        self._states.append(now)
        return rates_json(before, now, time_ms=time_ms)

    def clear(self) -> None:
        """Forget all states, after the last reader has left."""
        self._states.clear()
