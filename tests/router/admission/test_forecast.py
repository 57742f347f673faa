"""The forecast: running means of what ended, and the load of decode at the end of a prefill."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.admission.forecast import Capacity, Forecast, Load

_TIMES_MS = st.integers(0, 1000)


@given(st.lists(st.tuples(st.integers(1, 10_000), st.integers(2, 1000)), min_size=1, max_size=40))
def test_means_move_by_a_tenth_and_the_usual_maximum_is_two_deviations_more(
    ended: list[tuple[int, int]],
) -> None:
    forecast = Forecast()
    decode_ms, output_tokens = float(ended[0][0]), 256.0
    token_ms, deviation_ms = ended[0][0] / (ended[0][1] - 1), 0.0
    assert math.isinf(forecast.decode_ms) and forecast.run_ms(100) == 0.0
    for ms, tokens in ended:
        forecast.observe_first_token(50.0)
        forecast.observe_decode(ms, tokens)
        error_ms = ms / (tokens - 1) - token_ms
        decode_ms, output_tokens = 0.9 * decode_ms + 0.1 * ms, 0.9 * output_tokens + 0.1 * tokens
        token_ms += 0.1 * error_ms
        deviation_ms = 0.9 * deviation_ms + 0.1 * abs(error_ms)
    assert (forecast.decode_ms, forecast.output_tokens) == pytest.approx((decode_ms, output_tokens))
    for n in (1, 100_000):
        run_ms = 50.0 + (token_ms + 2 * deviation_ms) * min(n, output_tokens)
        assert forecast.run_ms(n) == pytest.approx(run_ms)


@given(
    st.lists(st.tuples(_TIMES_MS, _TIMES_MS), max_size=8),
    st.lists(st.tuples(_TIMES_MS, _TIMES_MS), max_size=8),
    st.integers(1, 1000),
    st.integers(1, 4),
)
def test_decode_has_what_comes_from_prefill_and_has_not_ended_by_then(
    prefilling: list[tuple[int, int]], decoding: list[tuple[int, int]], decode_ms: int, workers: int
) -> None:
    """Each is (context tokens, end of its prefill); the request prefills for 100 ms, from 500 ms on."""
    forecast, now_ms = Forecast(), 500.0
    forecast.observe_decode(decode_ms, 256)
    coming, staying = (
        [Load(1, tokens, 0.0, end_ms) for tokens, end_ms in each] for each in (prefilling, decoding)
    )
    capacity = Capacity(float(workers), workers, decode_tokens=1)
    predicted = forecast.predict(100, coming, staying, capacity, now_ms)
    begin_ms = now_ms
    while sum(end_ms > begin_ms for _, end_ms in prefilling) >= workers:
        begin_ms = min(end_ms for _, end_ms in prefilling if end_ms > begin_ms)
    assert (predicted.wait_ms, predicted.prefill_ms) == (begin_ms - now_ms, 100.0)
    then_ms = begin_ms + 100.0
    contexts = [tokens for tokens, end_ms in prefilling if then_ms - decode_ms < end_ms <= then_ms]
    soon = then_ms - now_ms < decode_ms / 2  # one that outlasts the mean runs for half a mean more
    contexts += [tokens for tokens, end_ms in decoding if soon or end_ms > then_ms - decode_ms]
    assert predicted.decode_sequences == len(contexts)
    assert predicted.decode_tokens == sum(contexts) + 256.0 * len(contexts)
