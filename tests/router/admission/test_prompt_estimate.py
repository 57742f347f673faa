"""The tokens that admission expects of a prompt's characters, after other prompts have ended."""

from __future__ import annotations

import pytest

from libs.common.telemetry.counters import Counters
from services.router.admission.gate import AdmissionGate
from services.router.admission.types import AdmissionLimits

_LONG = (40_000, 10_000, 0)  # characters, tokens, cached tokens: 4 characters a token
_SHORT = (2, 10, 0)  # most tokens are the template's


async def estimate(*prompts: tuple[int, int, int]) -> tuple[int, int]:
    """(tokens to compute, tokens of context) of 40,000 characters after these prompts."""
    gate = AdmissionGate(AdmissionLimits(), links_of=lambda _: (), counters=Counters(), unplaced=lambda: 0)
    for chars, tokens, cached in prompts:
        gate.observe_prompt(chars, prompt_tokens=tokens, cached_tokens=cached)
    return gate.estimate(40_000)


@pytest.mark.parametrize("before", [[], [_LONG]])
async def test_short_prompts_hardly_change_the_estimate_of_long_ones(
    before: list[tuple[int, int, int]],
) -> None:
    assert 10_000 <= (await estimate(*before, *[_SHORT] * 40))[1] < 15_000


async def test_long_prompts_correct_the_estimate() -> None:
    dense = (10_000, 10_000, 5_000)  # a character a token, half of them cached
    to_compute, context = await estimate(*[_SHORT] * 40, *[dense] * 200)
    assert context == pytest.approx(40_000, rel=0.05)
    assert to_compute == pytest.approx(20_000, rel=0.05)


async def test_a_single_prompt_moves_the_estimate_by_a_tenth_at_most() -> None:
    assert (await estimate((10_000, 100_000, 0)))[1] < 11_500
