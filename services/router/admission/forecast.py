"""The load of the fleet at the end of a new request's prefill. Pure; times in milliseconds.

A request loads prefill at once and decode only after its prefill. A rule that compares the load of decode
*now* (`naive`) admits too many requests while decode is idle. They all arrive there one prefill time later,
and the rule then refuses too many: prefill and decode swing in opposite phase (Mooncake, arXiv 2407.00079).
So the rule compares the load of decode at now + prefill time. It leaves out the sequences that will have
ended by then, if each lasts as long as recent ones. It adds those that will have come from prefill.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import msgspec

# Weight of a new sample in running means.
_WEIGHT = 0.1
_FIRST_OUTPUT_TOKENS = 256.0
# The fixed part of short prompts makes a prompt of n times their tokens seem up to n times as slow. Up to
# this factor the estimate counts in full.
_MEASURED_FACTOR = 4.0


class Capacity(msgspec.Struct, frozen=True, gc=False):
    """The capacity of the whole fleet. 0 = unknown, which refuses nothing."""

    prefill_tokens_per_ms: float = 0.0  # of all prefill workers together
    prefill_workers: int = 1
    decode_sequences: int = 0
    decode_tokens: int = 0  # KV places


@dataclass(slots=True)
class Load:
    """One admitted request."""

    prefill_tokens: int  # to be computed
    context_tokens: int  # of the prompt, cached ones included
    admitted_ms: float
    prefilled_ms: float  # expected, until it decodes


class PredictedLoad(msgspec.Struct, frozen=True, gc=False):
    """When the request's prefill would end, and the load of decode at that time without the request."""

    wait_ms: float  # before its prefill begins
    prefill_ms: float
    least_prefill_ms: float  # less, where recent prompts, which made the rate, are far shorter
    decode_sequences: int
    decode_tokens: float  # 0 where `capacity` does not limit them


class _UsualMaximum:
    """The usual maximum of a figure: its running mean and two mean deviations (as TCP's time-out)."""

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
    """Running means of recent requests, and the load predicted from them."""

    def __init__(self, *, naive: bool = False) -> None:
        self._naive = naive
        self._first_token_ms = _UsualMaximum()
        self._token_ms = _UsualMaximum()
        self._prompt_tokens: float | None = None  # to be computed, of the prompt of a token, on average
        self.decode_ms = math.inf  # until one has ended
        self.output_tokens = _FIRST_OUTPUT_TOKENS

    def observe_admitted(self, prefill_tokens: int) -> None:
        """Add a prompt, which corrects the workers' rate. They weigh prompts by their tokens as this mean."""
        mean = self._prompt_tokens or prefill_tokens
        weight = min(_WEIGHT * prefill_tokens / mean, 1.0) if mean else 0.0
        self._prompt_tokens = mean + weight * (prefill_tokens - mean)

    def observe_first_token(self, after_ms: float) -> None:
        """Add the time from admission to the first token."""
        self._first_token_ms.add(after_ms)

    def observe_decode(self, decode_ms: float, output_tokens: float) -> None:
        """Add the time from the first token to the last of a sequence, of at least 2 tokens."""
        if math.isinf(self.decode_ms):
            self.decode_ms = decode_ms
        self.decode_ms += _WEIGHT * (decode_ms - self.decode_ms)
        self.output_tokens += _WEIGHT * (output_tokens - self.output_tokens)
        self._token_ms.add(decode_ms / (output_tokens - 1))

    def run_ms(self, output_tokens: int) -> float:
        """The usual maximum of the time from admission to the end; 0 before any observation."""
        return self._first_token_ms.most + self._token_ms.most * min(output_tokens, self.output_tokens)

    def predict(
        self,
        prefill_tokens: int,
        prefilling: Collection[Load],
        decoding: Collection[Load],
        capacity: Capacity,
        now_ms: float,
    ) -> PredictedLoad:
        """The forecast for a request of so many tokens to compute, after all of these."""
        rate, workers = capacity.prefill_tokens_per_ms, capacity.prefill_workers
        wait_ms = prefill_ms = least_prefill_ms = 0.0
        if rate:
            if len(prefilling) >= workers:
                # Its prefill begins when fewer of them are left than there are workers.
                ends_ms = sorted([load.prefilled_ms for load in prefilling])
                wait_ms = max(0.0, ends_ms[len(ends_ms) - workers] - now_ms)
            prefill_ms = prefill_tokens * workers / rate  # one prompt runs on one worker
            least_prefill_ms = self._measured(prefill_tokens) * workers / rate
        then_ms = now_ms + wait_ms + prefill_ms
        come, stay = self._decoding_at(then_ms, prefilling, decoding, now_ms)
        sequences, tokens = len(come) + len(stay), 0.0
        if capacity.decode_tokens:
            contexts = [load.context_tokens for load in (*come, *stay)]
            tokens = sum(contexts) + sequences * self.output_tokens
        return PredictedLoad(wait_ms, prefill_ms, least_prefill_ms, sequences, tokens)

    def _measured(self, prefill_tokens: int) -> float:
        """The tokens of a prompt that the rate covers: at most _MEASURED_FACTOR times recent prompts' mean.

        `observe_admitted` raises that mean, so the next such prompt counts in full.
        """
        if self._prompt_tokens is None:
            return prefill_tokens
        return min(prefill_tokens, _MEASURED_FACTOR * self._prompt_tokens)

    def _decoding_at(
        self, then_ms: float, prefilling: Collection[Load], decoding: Collection[Load], now_ms: float
    ) -> tuple[Collection[Load], Collection[Load]]:
        """The requests that will have come from prefill, and those that decode now and still will."""
        if self._naive:
            return (), decoding
        least_ms = then_ms - self.decode_ms  # a request whose prefill ends later still decodes then
        come = [load for load in prefilling if least_ms < load.prefilled_ms <= then_ms]
        # A request that outlasts the mean runs for about half a mean more.
        if now_ms + self.decode_ms / 2 > then_ms:
            return come, decoding
        return come, [load for load in decoding if load.prefilled_ms > least_ms]
