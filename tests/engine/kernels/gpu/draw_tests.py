"""Tests of sampling without a wait, against the sampler on the CPU: the same tokens for any parameters."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from libs.engine.sampling.device_draws import DrawArrays, DrawParameters, choose_tokens, draw_arrays
from libs.engine.sampling.sampler import sample
from libs.engine.step.step_model import BAD_TOKEN
from libs.engine.step.types import SamplingParams
from tests.engine.kernels.gpu.program_target import ProgramTarget
from tests.engine.sampling.test_sampler import make_rows

parameters = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 0.8, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 2, 7, 40, 5000]),
    top_p=st.sampled_from([1.0, 0.999, 0.95, 0.5, 0.1]),
    min_p=st.sampled_from([0.0, 0.01, 0.2]),
    seed=st.integers(0, 2**64 - 1),
)


def on_device(target: ProgramTarget, arrays: DrawArrays) -> DrawParameters:
    names = ("temperature", "min_p_log", "top_k", "top_p", "draw")
    return DrawParameters(*(torch.from_numpy(getattr(arrays, name)).to(target.device) for name in names))


def logits_of(n_rows: int, vocab_size: int, seed: int, *, with_ties: bool) -> torch.Tensor:
    logits = torch.randn(n_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 4
    return logits.round() if with_ties else logits


class DrawTests:
    @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        params=st.lists(parameters, min_size=1, max_size=5),
        vocab_size=st.sampled_from([1, 40, 700, 5000]),
        seed=st.integers(0, 2**20),
        with_ties=st.booleans(),
    )
    def test_tokens_are_those_of_the_sampler(
        self, target: ProgramTarget, params: list[SamplingParams], vocab_size: int, seed: int, with_ties: bool
    ) -> None:
        rows = [make_rows(each, output=range(index)) for index, each in enumerate(params)]
        logits = logits_of(len(rows), vocab_size, seed, with_ties=with_ties)
        logits[0, : vocab_size // 3] = -torch.inf
        arrays = draw_arrays(rows)
        on = target.on(logits)
        actual = choose_tokens(on, on_device(target, arrays), target.programs.cut_rows)
        assert actual.tolist() == sample(logits.clone(), rows)[0]
        assert torch.equal(on.cpu(), logits)  # a graph may run twice on the same logits
        if not arrays.any_cut:
            assert torch.equal(choose_tokens(on, on_device(target, arrays), None), actual)
        if not arrays.any_drawn:
            assert torch.equal(choose_tokens(on, None, None), actual)

    @pytest.mark.parametrize("damage", [math.nan, math.inf])
    def test_a_row_without_finite_logits_is_bad_and_changes_no_other(
        self, target: ProgramTarget, damage: float
    ) -> None:
        rows = [make_rows(SamplingParams(temperature=1.0, top_p=0.9, seed=s)) for s in range(3)]
        logits = logits_of(3, 700, 1, with_ties=False)
        healthy = sample(logits.clone(), rows)[0]
        logits[1, 5] = damage
        chosen = choose_tokens(
            target.on(logits), on_device(target, draw_arrays(rows)), target.programs.cut_rows
        )
        assert chosen.tolist() == [healthy[0], BAD_TOKEN, healthy[2]]

    def test_the_cut_is_a_value_of_the_row(self, target: ProgramTarget) -> None:
        """The k-th largest, or the last of the fewest that reach the share of what top-k leaves."""
        scaled = target.on(torch.tensor([[0.0, -1.0, -1.0, -2.0, -3.0, -torch.inf]] * 5))
        weights = scaled.exp()
        cuts = target.programs.cut_rows(
            scaled,
            weights,
            target.on(torch.tensor([-torch.inf, -torch.inf, -torch.inf, -0.5, -torch.inf])),
            target.on(torch.tensor([2, 4, 0, 0, 6], dtype=torch.int32)),
            target.on(torch.tensor([1.0, 0.5, 0.999999, 1.0, 1.0], dtype=torch.float64)),
        )
        assert cuts.flatten().tolist() == [-1.0, 0.0, -3.0, -0.5, -torch.inf]
