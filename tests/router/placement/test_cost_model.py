"""Fits find the rates behind noisy reports, stay monotone and bounded, and survive wrong ones."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.placement.cost_model import (
    ROLE_WEIGHT,
    DecodeFit,
    PrefillFit,
    PrefillModel,
    PrefillReport,
    RateFit,
    attention_pairs,
)


def _prefill_reports(
    fit: PrefillFit, truth: PrefillModel, n: int, seed: int = 0, noise: float = 0.05
) -> None:
    draw = random.Random(seed)
    for _ in range(n):
        prompt = draw.randint(100, 60_000)
        uncached = draw.randint(1, prompt)
        dram = draw.choice((0, (prompt - uncached) // 2))
        nvme = draw.choice((0, (prompt - uncached) // 3))
        ahead, requests = draw.randint(0, 40_000), draw.randint(0, 5)
        peer, longer = draw.choice((0, (prompt - uncached) // 4)), draw.choice((0, 0, 50_000))
        duration_ms = (
            truth.queue_ms(ahead, requests, longer)
            + truth.compute_ms(uncached, prompt)
            + truth.load_ms(dram, nvme, peer)
        ) * draw.uniform(1 - noise, 1 + noise)
        fit.observe(
            PrefillReport(
                ahead_tokens=ahead,
                ahead_requests=requests,
                uncached_tokens=uncached,
                prompt_tokens=prompt,
                dram_tokens=dram,
                nvme_tokens=nvme,
                peer_tokens=peer,
                longer_tokens=longer,
                duration_ms=duration_ms,
            )
        )


@pytest.mark.parametrize(
    "truth",
    [
        PrefillModel(20.0, 0.05, 0.001, 0.002, 0.01),  # an accelerator
        PrefillModel(2.0, 1.5, 0.05, 0.05, 0.2),  # a few cores
    ],
)
def test_a_prefill_fit_predicts_what_it_was_shown(truth: PrefillModel) -> None:
    fit = PrefillFit()
    _prefill_reports(fit, truth, 400)
    for uncached, prompt in ((500, 500), (8_000, 8_000), (200, 50_000), (30_000, 60_000)):
        assert fit.model.compute_ms(uncached, prompt) == pytest.approx(
            truth.compute_ms(uncached, prompt), rel=0.2, abs=truth.request_ms
        )
    assert fit.model.queue_ms(30_000, 3) == pytest.approx(truth.queue_ms(30_000, 3), rel=0.2)


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_it_is_learnt_how_much_longer_prompts_delay_shorter_ones(share: float) -> None:
    """Not at all, for a share of the time, or all of it: then the worker computes in order."""
    truth = PrefillModel(20.0, 0.05, 0.001, 0.002, 0.01, longer_token_ms=max(share * 0.05, 1e-5))
    fit = PrefillFit()
    _prefill_reports(fit, truth, 400)
    assert fit.model.longer_token_ms == pytest.approx(truth.longer_token_ms, abs=0.005)


def test_a_decode_fit_predicts_steps_and_transfers() -> None:
    fit = DecodeFit()
    draw = random.Random(1)
    for _ in range(400):
        sequences, context = draw.randint(1, 64), draw.randint(100, 500_000)
        fit.observe_step(
            sequences=sequences,
            context_tokens=context,
            step_ms=(12 + 0.2 * sequences + 0.03 * context * 1e-3) * draw.uniform(0.9, 1.1),
        )
        n_bytes = draw.randint(1, 1 << 30)
        fit.observe_pull(n_bytes=n_bytes, transfer_ms=0.5 + n_bytes / (1 << 20) * 0.1)
    assert fit.model.step_ms(32, 200_000) == pytest.approx(12 + 6.4 + 6, rel=0.1)
    assert fit.model.transfer_ms(512 << 20) == pytest.approx(0.5 + 51.2, rel=0.1)


def test_a_few_absurd_reports_change_little() -> None:
    truth = PrefillModel(5.0, 0.1, 0.001, 0.01, 0.02)
    fit = PrefillFit()
    _prefill_reports(fit, truth, 300)
    before = fit.model.compute_ms(8_000, 8_000)
    for duration_ms in (0.0, 1e8, 1e8):
        fit.observe(
            PrefillReport(
                uncached_tokens=8_000,
                prompt_tokens=8_000,
                duration_ms=duration_ms,
            )
        )
    assert fit.model.compute_ms(8_000, 8_000) == pytest.approx(before, rel=0.15)


def test_a_worker_that_gets_slower_is_noticed() -> None:
    fit = PrefillFit()
    _prefill_reports(fit, PrefillModel(5.0, 0.1, 0.001, 0.01, 0.02), 300)
    slow = PrefillModel(5.0, 0.4, 0.004, 0.04, 0.08)
    _prefill_reports(fit, slow, 300, seed=2)
    assert fit.model.compute_ms(8_000, 8_000) > 0.6 * slow.compute_ms(8_000, 8_000)


def test_equal_workers_look_more_equal_when_they_lean_on_their_role() -> None:
    truth = PrefillModel(15.0, 0.15, 0.001, 0.004, 0.02)
    alone, leaning, role = ([PrefillFit() for _ in range(n)] for n in (6, 6, 1))
    _prefill_reports(role[0], truth, 300, noise=0.3)
    for i, (by_itself, with_role) in enumerate(zip(alone, leaning, strict=True)):
        with_role.set_prior_from(role[0])
        for fit in (by_itself, with_role):
            _prefill_reports(fit, truth, 60, seed=10 + i, noise=0.6)

    def spread(fits: list[PrefillFit]) -> float:
        times_ms = [fit.model.compute_ms(8_000, 8_000) for fit in fits]
        return (max(times_ms) - min(times_ms)) / truth.compute_ms(8_000, 8_000)

    assert spread(leaning) < 0.8 * spread(alone)


def test_a_worker_unlike_its_role_gets_rates_of_its_own() -> None:
    role, slow = PrefillFit(), PrefillFit()
    usual, truth = PrefillModel(5.0, 0.1, 0.001, 0.01, 0.02), PrefillModel(10.0, 0.2, 0.002, 0.02, 0.04)
    _prefill_reports(role, usual, 300)
    slow.set_prior_from(role)
    assert ROLE_WEIGHT < 64 / 4  # reports that are remembered
    _prefill_reports(slow, truth, 200, seed=1)
    assert slow.model.compute_ms(8_000, 8_000) == pytest.approx(truth.compute_ms(8_000, 8_000), rel=0.2)


numbers = st.floats(allow_nan=True, allow_infinity=True)


@given(st.lists(st.tuples(numbers, numbers, numbers), max_size=30), st.tuples(*[st.floats(0, 1e6)] * 2))
def test_any_reports_leave_rates_positive_finite_and_predictions_monotone(
    reports: list[tuple[float, float, float]], at: tuple[float, float]
) -> None:
    fit = RateFit((5.0, 0.5))
    for x, y, duration_ms in reports:
        fit.observe((x, y), duration_ms)
    assert all(0 < rate < math.inf for rate in fit.rates)
    x, y = at
    here = fit.predict_ms((x, y))
    assert fit.predict_ms((x + 1, y)) >= here
    assert fit.predict_ms((x, y + 1)) >= here


def test_the_same_reports_give_the_same_rates() -> None:
    one, two = PrefillFit(), PrefillFit()
    for fit in (one, two):
        _prefill_reports(fit, PrefillModel(), 50)
    assert one.model == two.model


def test_what_is_never_seen_stays_at_its_prior() -> None:
    fit = PrefillFit()
    for _ in range(100):
        fit.observe(
            PrefillReport(
                uncached_tokens=1000,
                prompt_tokens=1000,
                duration_ms=50.0,
            )
        )
    assert fit.model.nvme_token_ms == pytest.approx(PrefillModel().nvme_token_ms)
    assert fit.model.compute_ms(1000, 1000) == pytest.approx(50, rel=0.1)


def test_pairs_grow_with_context_and_are_those_of_a_triangle() -> None:
    assert attention_pairs(1000, 1000) == 500
    assert attention_pairs(10, 1000) == pytest.approx(9.95)


def test_a_prior_must_be_positive() -> None:
    with pytest.raises(ValueError):
        RateFit((1.0, 0.0))


def test_a_prior_that_moves_counts_from_then_on() -> None:
    fit, role_rates = RateFit((2.0,)), [3.0]
    for rate in (3.0, 3.0, 5.0):
        role_rates[0] = rate  # the same list: a role's rates change in place
        fit.set_prior(role_rates, 4.0)
        fit.observe((1.0,), 1.0)
        for _ in range(2):  # a report came before the first
            fit.decay(0.0)
        assert fit.rates[0] == pytest.approx(rate, rel=0.02)
