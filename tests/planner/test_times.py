"""Times grow with what has to be read or computed, and plans keep to their limits."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.engine.parallel.split import MICRO_BATCH_ROWS, count_micro_batches
from libs.planner.cards import parse_cards
from libs.planner.cuts import Cut, cut_stages, enumerate_cuts
from libs.planner.exchanges import GATHERED, hops_s, share_s, sum_s
from libs.planner.plan import _most_sequences, make_plan
from libs.planner.shapes.model_shape import ModelShape
from libs.planner.times import EFFICIENCY, LAYER_OVERHEAD_S, Rows, StepTimes
from libs.planner.traffic import Traffic
from tests.planner.shapes import kimi, scout
from tests.support.examples import examples

_MODEL = kimi()
_CARDS = parse_cards("8xh200")
_CUTS = list(enumerate_cuts(_MODEL, 8))
_STAGES = {pp: cut_stages(_MODEL, pp) for pp in {cut.pp for cut in _CUTS}}


def _times(cut: Cut) -> StepTimes:
    return StepTimes(_MODEL, cut, _STAGES[cut.pp], _CARDS[1])


@given(st.sampled_from(_CUTS), st.integers(1, 256), st.integers(1, 200_000), st.integers(1, 4))
def test_steps_cost_more_with_more_sequences_context_or_rows(
    cut: Cut, n_sequences: int, context_tokens: int, rows: int
) -> None:
    """As long as a step has as many micro-batches."""

    def n_parts(n: int, each: int) -> int:
        return count_micro_batches(n * each, cut.pp)

    times = _times(cut)
    step = times.decode_step_s(n_sequences, context_tokens, rows)
    assert step <= times.decode_step_s(n_sequences, context_tokens + 1000, rows)
    if n_parts(n_sequences + 1, rows) == n_parts(n_sequences, rows):
        assert step <= times.decode_step_s(n_sequences + 1, context_tokens, rows)
    if n_parts(n_sequences, rows + 1) == n_parts(n_sequences, rows):
        assert step <= times.decode_step_s(n_sequences, context_tokens, rows + 1)


@given(st.sampled_from([2, 4, 8]), st.integers(1, 2 * MICRO_BATCH_ROWS - 1), st.integers(1, 200_000))
def test_a_decode_step_of_a_pipeline_takes_the_sum_of_its_stages(
    pp: int, n_sequences: int, context_tokens: int
) -> None:
    """So its time is that of one card with all layers, and of the ways between the stages."""
    one = _times(Cut(1)).decode_step_s(n_sequences, context_tokens)
    hops = hops_s(_MODEL, Cut(1, pp), _CARDS[1], n_sequences)
    step = _times(Cut(1, pp)).decode_step_s(n_sequences, context_tokens)
    assert (one + hops) * (1 - 1e-9) <= step == pytest.approx(one + hops, rel=0.02)


@given(
    st.sampled_from([(model, cut) for model in (kimi(), scout()) for cut in enumerate_cuts(model, 8)]),
    st.integers(8, 512),
    st.integers(1, 200_000),
)
def test_a_stage_takes_what_its_layers_read_compute_and_exchange(
    of: tuple[ModelShape, Cut], n_rows: int, context_tokens: int
) -> None:
    """Each layer by itself, for a stage of one or several."""
    (model, cut), card = of, _CARDS[1]
    times = StepTimes(model, cut, cut_stages(model, cut.pp), card)
    each = max(n_rows / cut.dp, 1.0)  # sequences of a part
    copies = max(cut.tp // (cut.dp * cut.kv) // model.kv_heads, 1)  # of their KV
    for stage in times.stages:
        read = flops = 0.0
        for layer in stage.layers:
            kv = each * (context_tokens * layer.kv_token_bytes + layer.kv_window_bytes)
            projections, weights = (cut.kv - 1) * layer.heads_bytes, (cut.kv - 1) * layer.heads_params
            hits = layer.fullest_part_hits(n_rows, cut.ep) * cut.ep
            read += (layer.attention_bytes + projections) * cut.dp + kv * cut.dp * copies
            read += layer.shared_bytes + hits * layer.expert_bytes
            row = 2 * (layer.attention_params + weights) + layer.context_flops * context_tokens
            flops += row * each * cut.dp + 2 * (layer.active_params - layer.attention_params) * n_rows
        bound_s = max(read / card.copy_bytes_per_s, flops / card.bf16_flops) / cut.tp / EFFICIENCY
        n_sums = 2 * len(stage.layers) + (stage is times.stages[0])  # one of the embedding
        sums_s = n_sums * sum_s(model, cut, card, n_rows, GATHERED)
        layers_s = LAYER_OVERHEAD_S + share_s(model, cut, card, each)
        found = times._stage_s(stage, Rows(n_rows, 1, context_tokens))
        assert found == pytest.approx(bound_s + sums_s + len(stage.layers) * layers_s)
    head_s = max(model.head_bytes / card.copy_bytes_per_s, 2 * model.head_params * n_rows / card.bf16_flops)
    for rows in (Rows(n_rows, 1, context_tokens), Rows(n_rows, 7, context_tokens, is_prefill=True)):
        assert times._head_s(rows) == pytest.approx(head_s / cut.tp / EFFICIENCY)


@given(st.sampled_from([2, 4, 8]), st.integers(2 * MICRO_BATCH_ROWS, 4096))
def test_micro_batches_follow_behind_the_slowest_stage(pp: int, n_sequences: int) -> None:
    """A step of m micro-batches takes m - 1 of the slowest stage, and one of them all stages."""
    times, m = _times(Cut(1, pp)), count_micro_batches(n_sequences, pp)
    assert m >= 2
    part = Rows(n_sequences / m, 1, 4096)
    stages = [times._stage_s(stage, part) for stage in times.stages]
    hops = hops_s(_MODEL, Cut(1, pp), _CARDS[1], part.n_rows)
    step = times.decode_step_s(n_sequences, 4096) - times._head_s(Rows(n_sequences, 1, 4096))
    assert step == pytest.approx(sum(stages) + (m - 1) * max(stages) + hops)


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(1, 3000))
def test_the_most_sequences_in_time_are_found_where_more_micro_batches_are_faster(
    is_fast: list[bool], room: int
) -> None:
    """`is_fast`: of steps with so many full micro-batches; within one, more sequences take longer."""

    def is_in_time(n: int) -> bool:
        segment, place = divmod(n, MICRO_BATCH_ROWS)
        return is_fast[segment % len(is_fast)] and place < 50

    found = _most_sequences(is_in_time, room)
    in_time = [n for n in range(1, room + 1) if is_in_time(n)]
    assert found == (in_time[-1] if in_time else 1)


@given(st.sampled_from(_CUTS), st.integers(64, 200_000), st.data())
def test_cached_prompts_cost_less(cut: Cut, prompt_tokens: int, data: st.DataObject) -> None:
    times = _times(cut)
    cached = data.draw(st.integers(0, prompt_tokens - 1))
    assert 0 < times.prefill_s(prompt_tokens - cached, cached) <= times.prefill_s(prompt_tokens)


@given(st.integers(1, 4096), st.sampled_from([1, 2, 4, 8, 16]))
def test_the_fullest_part_has_more_than_its_share_of_experts_and_no_more_than_it_has(
    n_tokens: int, n_parts: int
) -> None:
    layer = _MODEL.layers[1]
    hits = layer.fullest_part_hits(n_tokens, n_parts)
    assert layer.expert_hits(n_tokens) / n_parts <= hits <= layer.n_experts / n_parts


@pytest.mark.parametrize("n_tokens", [2, 8, 32, 128])
@pytest.mark.parametrize("n_parts", [2, 8])
def test_the_fullest_part_is_that_of_random_routing(n_tokens: int, n_parts: int) -> None:
    layer, random = _MODEL.layers[1], np.random.default_rng(1)
    most = []
    for _ in range(200):
        rows = random.random((n_tokens, layer.n_experts)).argpartition(layer.experts_per_token, axis=1)
        reached = np.unique(rows[:, : layer.experts_per_token])
        most.append(np.bincount(reached * n_parts // layer.n_experts, minlength=n_parts).max())
    assert layer.fullest_part_hits(n_tokens, n_parts) == pytest.approx(np.mean(most), rel=0.25)


def test_a_step_is_never_under_the_memory_floor() -> None:
    floor_s = 33.0e9 / (8 * 4.3e12)  # bytes that one token of K2.5 needs, from all cards of the node
    assert all(_times(cut).decode_step_s(1, 4096) > floor_s for cut in _CUTS)


@settings(max_examples=examples(15))
@given(
    st.integers(64, 100_000),
    st.integers(1, 4_000),
    st.floats(0.02, 0.2),
    st.floats(0.0, 0.99),
)
def test_the_chosen_cut_keeps_its_limits(
    prompt_tokens: int, output_tokens: int, max_token_s: float, cached: float
) -> None:
    traffic = Traffic(prompt_tokens, int(prompt_tokens * cached), output_tokens)
    plan = make_plan(_MODEL, *_CARDS, traffic=traffic, max_token_s=max_token_s)
    rates = [one.capacity.requests_per_s if one.capacity else -1 for one in plan.candidates]
    assert rates == sorted(rates, reverse=True)
    for one in plan.candidates:
        if one.capacity is not None:
            assert one.capacity.n_sequences * (prompt_tokens + output_tokens) <= one.fit.all_kv_tokens
            assert one.capacity.n_sequences == one.fit.cut.replicas or one.capacity.token_s <= max_token_s
    assert plan.chosen.fit.cut.name in plan.reason
    if figures := re.search(r"\(.*?([\d,.]+) .* instead of ([\d,.]+)", plan.reason):
        assert figures[1] != figures[2]
