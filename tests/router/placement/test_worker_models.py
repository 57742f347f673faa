"""What is known of workers: of each, of its role, and less and less while nothing is heard of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from services.router.placement.cost_model import DecodeModel, PrefillModel, PrefillReport, RateFit
from services.router.placement.worker_models import DECAY_S, WorkerModels


def _steps(models: WorkerModels, worker: str, step_ms: float, n: int) -> None:
    for _ in range(n):
        models.observe_step(worker, sequences=4, context_tokens=1_000, step_ms=step_ms)


def _step_ms(models: WorkerModels, worker: str) -> float:
    return models.decode_model(worker).step_ms(4, 1_000)


def _decay_for(models: WorkerModels, seconds: int, *, heard: str = "", step_ms: float = 0.0) -> None:
    """Once a second, as the fleet does it; `heard` reports meanwhile."""
    for _ in range(seconds):
        if heard:
            _steps(models, heard, step_ms, 2)
        models.decay(1.0)


def _prompts(models: WorkerModels, worker: str, token_ms: float, n: int) -> None:
    for i in range(n):
        tokens = 1_000 + 100 * (i % 7)
        report = PrefillReport(uncached_tokens=tokens, prompt_tokens=tokens, duration_ms=token_ms * tokens)
        models.observe_prefill(worker, report)


def test_a_worker_without_reports_has_the_stated_speed_and_then_that_of_its_role() -> None:
    """Of eight reports on; a departed worker is one without reports."""
    models, usual = WorkerModels(), PrefillModel()
    assert models.prefill_model("new") == usual and models.decode_model("new") == DecodeModel()
    assert models.prefill_model("new", tokens_per_s=4_000.0) == replace(usual, token_ms=0.25)
    for extreme, token_ms in ((1e-300, 1e4 * usual.token_ms), (1e300, usual.token_ms / 1e4)):
        assert models.prefill_model("new", tokens_per_s=extreme).token_ms == pytest.approx(token_ms)
    for n_reports in range(1, 9):
        _prompts(models, "a", 0.1, 1)
        _steps(models, "a", 40.0, 1)
        known = n_reports >= 8
        assert (models.prefill_model("new", tokens_per_s=4_000.0).token_ms != 0.25) == known
        assert (models.decode_model("new") != DecodeModel()) == known
    role = models.prefill_model("new"), models.decode_model("new")
    for n_more in range(1, 9):  # every fourth report is one of the role, too
        _prompts(models, "a", 0.2, 1)
        assert (models.prefill_model("new") != role[0]) == (n_more > 3)
    own, of_role = models.prefill_model("a"), models.prefill_model("new")
    assert own != of_role
    models.remove("a")
    models.remove("a")
    assert (models.prefill_model("a"), models.decode_model("a")) == (of_role, role[1])
    assert not models.known()


def test_transfers_are_those_of_the_worker_and_its_role() -> None:
    models, mib = WorkerModels(), 1 << 20
    for n in range(40):
        models.observe_pull("a", n_bytes=mib * (1 + n % 7), transfer_ms=5.0 + 3.0 * (1 + n % 7))
    for worker in ("a", "new"):
        assert models.decode_model(worker).transfer_ms(4 * mib) == pytest.approx(17.0, rel=0.2)
    for n in range(400):
        models.observe_pull("b", n_bytes=mib * (1 + n % 7), transfer_ms=3 * (5.0 + 3.0 * (1 + n % 7)))
    before_ms = models.decode_model("a").transfer_ms(4 * mib)
    for _ in range(int(8 * DECAY_S)):
        models.observe_pull("b", n_bytes=4 * mib, transfer_ms=51.0)
        models.decay(1.0)
    assert models.decode_model("a").transfer_ms(4 * mib) > 1.3 * before_ms, "it fades towards its role"


def test_a_worker_that_was_slow_and_is_avoided_is_soon_taken_to_be_like_the_others() -> None:
    models = WorkerModels()
    _steps(models, "a", 10.0, 20)
    _steps(models, "b", 40.0, 64)
    assert _step_ms(models, "b") > 30.0
    _decay_for(models, 1, heard="a", step_ms=10.0)
    assert _step_ms(models, "b") > 30.0
    _decay_for(models, int(6 * DECAY_S), heard="a", step_ms=10.0)
    assert _step_ms(models, "b") < 1.2 * _step_ms(models, "a")
    assert _step_ms(models, "a") == pytest.approx(10.0, rel=0.1)


def test_a_slow_worker_that_is_heard_of_stays_known_to_be_slow() -> None:
    models = WorkerModels()
    for _ in range(200):
        _steps(models, "a", 10.0, 2)
        _steps(models, "b", 40.0, 2)
        models.decay(1.0)
    assert _step_ms(models, "b") > 2 * _step_ms(models, "a")


def test_prefill_workers_fade_as_well() -> None:
    models = WorkerModels()

    _prompts(models, "a", 0.1, 100)
    _prompts(models, "b", 0.3, 64)
    slow_ms = models.prefill_model("b").compute_ms(1_000, 1_000)
    for _ in range(int(6 * DECAY_S)):
        _prompts(models, "a", 0.1, 1)
        models.decay(1.0)
    quick_ms = models.prefill_model("a").compute_ms(1_000, 1_000)
    assert slow_ms > 2 * quick_ms
    assert models.prefill_model("b").compute_ms(1_000, 1_000) < 1.2 * quick_ms


@given(
    st.lists(st.tuples(st.floats(0, 100), st.floats(0, 1e4)), min_size=1, max_size=30),
    st.lists(st.floats(0.0, 1.0), max_size=40),
)
def test_to_fade_leads_from_the_reports_to_the_prior_and_nowhere_else(
    reports: list[tuple[float, float]], kept: list[float]
) -> None:
    fit = RateFit((2.0,))
    for quantity, duration_ms in reports:
        fit.observe((quantity,), duration_ms)
    fit.decay(0.0)  # reports came: nothing is forgotten yet
    told = fit.rates[0]
    before = told
    for share in kept:
        fit.decay(share)
        assert min(told, 2.0) - 1e-6 <= fit.rates[0] <= max(told, 2.0) + 1e-6
        assert abs(fit.rates[0] - 2.0) <= abs(before - 2.0) + 1e-6
        before = fit.rates[0]
    fit.decay(0.0)
    assert fit.rates[0] == pytest.approx(2.0, rel=0.02)
