"""What the fleet will carry when a request that comes now has been prefilled. Pure; times in milliseconds.

A request loads prefill at once and decode only after its prefill. Judging decode by its load of *now*
(`naive`) admits too many while decode is idle; all of them arrive there one prefill time later, together,
when too many are then turned away: prefill and decode swing in opposite phase (Mooncake, arXiv 2407.00079).
So decode is judged at now + prefill time: without the sequences that will have ended by then (each decode
is taken to last as long as recent ones), with those that will have come from prefill.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import msgspec

# Weight of a new sample in running means.
_WEIGHT = 0.1
_FIRST_OUTPUT_TOKENS = 256.0


class Capacity(msgspec.Struct, frozen=True, gc=False):
    """What the whole fleet can do. 0 = unknown, which refuses nothing."""

    prefill_tokens_per_ms: float = 0.0  # of all prefill workers together
    prefill_workers: int = 1
    decode_sequences: int = 0
    decode_tokens: int = 0  # KV places


@dataclass(slots=True)
class Load:
    """One admitted request, as far as the forecast knows it."""

    prefill_tokens: int  # to be computed
    context_tokens: int  # of the prompt, cached ones included
    admitted_ms: float
    prefilled_ms: float  # expected, until it decodes


class Outlook(msgspec.Struct, frozen=True, gc=False):
    """A moment ahead: when the request's prefill would end, and decode's load then without it."""

    wait_ms: float  # before its prefill begins
    prefill_ms: float
    decode_sequences: int
    decode_tokens: float  # 0 where `capacity` does not limit them


class _Usual:
    """What a figure usually is at most: its running mean and two mean deviations (as TCP's time-out)."""

    def __init__(self) -> None:
        self._mean: float | None = None
        self._deviation = 0.0

    def add(self, value: float) -> None:
        if self._mean is None:
            self._mean = value
        error = value - self._mean
        self._mean += _WEIGHT * error
        self._deviation += _WEIGHT * (abs(error) - self._deviation)

    @property
    def most(self) -> float:
        return (self._mean or 0.0) + 2.0 * self._deviation


class Forecast:
    """Recent means, and the outlook made from them."""

    def __init__(self, *, naive: bool = False) -> None:
        self._naive = naive
        self._first_token_ms = _Usual()
        self._token_ms = _Usual()
        self.decode_ms = math.inf  # until one has ended
        self.output_tokens = _FIRST_OUTPUT_TOKENS

    def observe_first_token(self, after_ms: float) -> None:
        """A request showed its first token so long after it was let in."""
        self._first_token_ms.add(after_ms)

    def observe_decode(self, decode_ms: float, output_tokens: float) -> None:
        """A sequence ended: first token to last, and how many there were (2 at least)."""
        if math.isinf(self.decode_ms):
            self.decode_ms = decode_ms
        self.decode_ms += _WEIGHT * (decode_ms - self.decode_ms)
        self.output_tokens += _WEIGHT * (output_tokens - self.output_tokens)
        self._token_ms.add(decode_ms / (output_tokens - 1))

    def run_ms(self, output_tokens: int) -> float:
        """How long a request usually runs at most, from being let in to its end; 0 while nothing is known."""
        return self._first_token_ms.most + self._token_ms.most * min(output_tokens, self.output_tokens)

    def outlook(
        self,
        prefill_tokens: int,
        prefilling: Collection[Load],
        decoding: Collection[Load],
        capacity: Capacity,
        now_ms: float,
    ) -> Outlook:
        """For a request of that many tokens to compute, behind all of these."""
        rate, workers = capacity.prefill_tokens_per_ms, capacity.prefill_workers
        wait_ms = prefill_ms = 0.0
        if rate:
            if len(prefilling) >= workers:
                # Its turn comes when so many of them are done that a worker is left over.
                ends_ms = sorted([load.prefilled_ms for load in prefilling])
                wait_ms = max(0.0, ends_ms[len(ends_ms) - workers] - now_ms)
            prefill_ms = prefill_tokens * workers / rate  # one prompt runs on one worker
        then_ms = now_ms + wait_ms + prefill_ms
        come, stay = self._decoding_at(then_ms, prefilling, decoding, now_ms)
        sequences, tokens = len(come) + len(stay), 0.0
        if capacity.decode_tokens:
            contexts = [load.context_tokens for load in (*come, *stay)]
            tokens = sum(contexts) + sequences * self.output_tokens
        return Outlook(wait_ms, prefill_ms, sequences, tokens)

    def _decoding_at(
        self, then_ms: float, prefilling: Collection[Load], decoding: Collection[Load], now_ms: float
    ) -> tuple[Collection[Load], Collection[Load]]:
        """Those that will have come from prefill, and those that decode already and still will."""
        if self._naive:
            return (), decoding
        least_ms = then_ms - self.decode_ms  # whose prefill ended later has not ended then
        come = [load for load in prefilling if least_ms < load.prefilled_ms <= then_ms]
        # One that outlasts the mean goes on for about half a mean more.
        if now_ms + self.decode_ms / 2 > then_ms:
            return come, decoding
        return come, [load for load in decoding if load.prefilled_ms > least_ms]
