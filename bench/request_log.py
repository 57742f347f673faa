"""Logs of the requests of a load run, and their summary. Pure.

ITL is the time between two tokens of a request at the client; tokens that arrive together share the gap
before them evenly. The time per token of a request is the mean of its ITLs (vLLM's benchmark calls it TPOT).
Goodput counts only requests within both limits.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class RequestLog:
    """Times in seconds on one monotonic clock; `arrivals` are (time, tokens emitted so far)."""

    sent_s: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    acceptance_length: float = 0.0
    decode_steps: int = 0
    error: str = ""

    @property
    def ttft_ms(self) -> float | None:
        """The time from sending to the first token; None without a token."""
        return (self.arrivals[0][0] - self.sent_s) * 1e3 if self.arrivals else None

    def itl_ms(self) -> list[float]:
        """One gap for each token after the first arrival."""
        gaps: list[float] = []
        for (t0, n0), (t1, n1) in zip(self.arrivals, self.arrivals[1:], strict=False):
            fresh = max(n1 - n0, 0)
            gaps += [(t1 - t0) * 1e3 / fresh] * fresh
        return gaps

    @property
    def time_per_token_ms(self) -> float | None:
        """The mean of `itl_ms`; None without a second token."""
        gaps = self.itl_ms()
        return sum(gaps) / len(gaps) if gaps else None


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p90 and p99 by linear interpolation; empty for no values."""
    if not values:
        return {}
    if len(values) == 1:
        return {f"p{p}": round(values[0], 2) for p in (50, 90, 99)}
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {f"p{p}": round(cuts[p - 1], 2) for p in (50, 90, 99)}


def summarise(
    logs: Sequence[RequestLog], *, wall_s: float, ttft_limit_ms: float, itl_limit_ms: float
) -> dict[str, object]:
    """The report of one run."""
    done = [log for log in logs if not log.error]
    ttfts = [t for log in done if (t := log.ttft_ms) is not None]
    itls = [gap for log in done for gap in log.itl_ms()]
    times_per_token = [t for log in done if (t := log.time_per_token_ms) is not None]
    good = [log for log in done if _is_good(log, ttft_limit_ms, itl_limit_ms)]
    prompt = sum(log.prompt_tokens for log in done)
    completion = sum(log.completion_tokens for log in done)
    steps = sum(log.decode_steps for log in done)
    errors: dict[str, int] = {}
    for log in logs:
        if log.error:
            errors[log.error] = errors.get(log.error, 0) + 1
    return {
        "requests": len(logs),
        "failed": len(logs) - len(done),
        "errors": errors,
        "wall_s": round(wall_s, 2),
        "mean_prompt_tokens": round(prompt / len(done), 1) if done else 0.0,
        "ttft_ms": percentiles(ttfts),
        "itl_ms": percentiles(itls),
        "time_per_token_ms": percentiles(times_per_token),
        "completion_tokens_per_s": round(completion / wall_s, 1) if wall_s else 0.0,
        "prompt_tokens_per_s": round(prompt / wall_s, 1) if wall_s else 0.0,
        "goodput_requests_per_s": round(len(good) / wall_s, 3) if wall_s else 0.0,
        "goodput_share": round(len(good) / len(logs), 4) if logs else 0.0,
        "cached_share": round(sum(log.cached_tokens for log in done) / prompt, 4) if prompt else 0.0,
        "tokens_per_decode_step": round((completion - len(done)) / steps, 2) if steps else 0.0,
    }


def _is_good(log: RequestLog, ttft_limit_ms: float, itl_limit_ms: float) -> bool:
    time_per_token_ms = log.time_per_token_ms or 0.0
    return log.ttft_ms is not None and log.ttft_ms <= ttft_limit_ms and time_per_token_ms <= itl_limit_ms
