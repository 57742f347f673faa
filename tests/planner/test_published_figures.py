"""The planner derives the published memory and speed figures from config.json alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from libs.engine.parallel.sizes import parse_sizes
from libs.planner.cards import GIB, parse_cards
from libs.planner.cuts import Cut, cut_stages, enumerate_cuts, reference_cuts
from libs.planner.exchanges import ALL_REDUCED
from libs.planner.fit import CardMemory, fit_memory, kv_shares
from libs.planner.plan import capacity_at, make_plan
from libs.planner.shapes.llama4_shape import llama4_shape
from libs.planner.shapes.model_shape import ModelShape
from libs.planner.times import EFFICIENCY, StepTimes
from libs.planner.traffic import Traffic
from slipstream.errors import InvalidArgument
from tests.planner.shapes import SCOUT_CONFIG, kimi, scout

DOCS = (Path(__file__).parents[2] / "docs/planner.md").read_text(encoding="utf-8")

# Kimi-K2.5 on 8 x H100 of 79.65 GiB: GiB of the fullest card, and thousands of distinct tokens with 1.5, 2.5
# and 3.5 GiB a card for everything else.
_TABLE = {
    Cut(8): (69.28, 135, 120, 105),
    Cut(4, 2): (69.51, 260, 230, 200),
    Cut(2, 4): (70.51, 445, 387, 329),
    Cut(1, 8): (73.08, 591, 474, 358),
    Cut(8, kv=8, exchanges_queries=True): (69.28, 1083, 961, 839),
}

# Tokens/s a user of Kimi-K2.5 on 8 x H200 (TP8, 8,192 tokens in, 1,024 out), by streams.
_SPEED = {4: 91.2, 8: 70.3, 16: 46.6, 32: 28.9, 64: 16.7}


def test_weights_of_kimi() -> None:
    model = kimi()
    assert model.weights_bytes / 1e9 == pytest.approx(595.15, abs=0.01)
    assert model.kv_token_bytes == 70_272
    assert model.layers[1].expert_bytes == pytest.approx(24.77e6, rel=1e-3)
    assert 31e9 < sum(layer.active_params for layer in model.layers) + model.head_params < 33e9


@pytest.mark.parametrize("cut", _TABLE, ids=lambda cut: cut.name)
def test_memory_of_kimi_on_eight_h100(cut: Cut) -> None:
    card = parse_cards("8xh100-80")[1]
    weights_gib, *tokens_k = _TABLE[cut]
    for overhead_gib, expected in zip((1.5, 2.5, 3.5), tokens_k, strict=True):
        fit = fit_memory(kimi(), cut, CardMemory(card.visible_bytes, int(overhead_gib * GIB)))
        assert fit.card_weights_bytes / GIB == pytest.approx(weights_gib, rel=1e-3)
        assert fit.kv_tokens / 1e3 == pytest.approx(expected, rel=0.01)
        assert fit.group_free_bytes / GIB == pytest.approx(637.2 - 554.27 - 8 * overhead_gib, rel=0.01)
        assert fit.fits


def test_the_published_split_of_another_engine_is_a_reference() -> None:
    """It exchanges queries; the same split of this engine copies projections."""
    plan = make_plan(kimi(), *parse_cards("8xh100-80"))
    (reference,) = plan.references
    assert reference.cut == Cut(8, kv=8, exchanges_queries=True) and reference.kv_tokens == 961_171
    assert not any(one.fit.cut.exchanges_queries for one in plan.candidates)
    (own,) = [one.fit for one in plan.candidates if one.fit.cut == Cut(8, kv=8)]
    assert own.kv_tokens == 629_850
    assert list(reference_cuts(kimi(), 4)) == [Cut(4, kv=4, exchanges_queries=True)]
    assert list(reference_cuts(kimi(), 16)) == [Cut(8, kv=8, replicas=2, exchanges_queries=True)]


def test_a_kv_split_copies_the_projections_of_its_heads() -> None:
    card, overhead_bytes = parse_cards("8xh100-80")[1], int(2.5 * GIB)
    heads_bytes = 61 * 2 * 64 * (1536 * 192 + 512 * 256)  # of q_b_proj and kv_b_proj
    whole = fit_memory(kimi(), Cut(8), CardMemory(card.visible_bytes, overhead_bytes))
    for kv in (2, 4, 8):
        fit = fit_memory(kimi(), Cut(8, kv=kv), CardMemory(card.visible_bytes, overhead_bytes))
        assert fit.card_weights_bytes - whole.card_weights_bytes == heads_bytes * (kv - 1) // 8
        assert fit.kv_tokens == fit.card_free_bytes * kv // 70_272


def test_the_flags_of_each_cut_take_all_cards() -> None:
    plan = make_plan(kimi(), *parse_cards("8xh100-80"))
    for candidate in plan.candidates:
        cut = candidate.fit.cut
        sizes = parse_sizes(replace(plan, candidates=(candidate,)).worker_arguments()["parallel"])
        assert sizes == cut.sizes and sizes.n_ranks * cut.replicas == 8


def test_over_thirty_gib_are_left_on_eight_h100() -> None:
    plan = make_plan(kimi(), *parse_cards("8xh100-80"))
    cuts = ((one.fit, one.fit.cut) for one in plan.candidates)
    once = [fit for fit, cut in cuts if (cut.dp, cut.ep, cut.replicas) == (1, 1, 1)]
    assert len(once) == 10 and all(fit.group_free_bytes > 30 * GIB for fit in once)


def test_copied_attention_does_not_fit_eight_h100() -> None:
    cut = Cut(8, dp=8)
    fit = fit_memory(kimi(), cut, CardMemory(parse_cards("8xh100-80")[1].visible_bytes, int(2.5 * GIB)))
    assert fit.card_weights_bytes / GIB == pytest.approx(79.34, rel=1e-3)
    assert not fit.fits


def test_scout_on_two_h200() -> None:
    model = scout()
    assert model.weights_bytes / GIB == pytest.approx(202.4, abs=0.2)
    assert 56 * GIB // model.kv_token_bytes == pytest.approx(1_223_339, abs=2)
    assert model.kv_window_bytes / GIB == pytest.approx(1.125)
    plan = make_plan(model, *parse_cards("2xh200-141"))
    assert plan.chosen.fit.kv_tokens > 1_220_000
    assert fit_memory(model, Cut(2), CardMemory(1 << 30)).kv_tokens == 0


def test_maverick_has_experts_in_every_second_layer() -> None:
    text = SCOUT_CONFIG["text_config"] | {"num_local_experts": 128, "interleave_moe_layer_step": 2}
    model = llama4_shape(SCOUT_CONFIG | {"text_config": text}, "maverick")
    assert model.weights_bytes == 2 * 401_583_781_376
    assert [layer.n_experts for layer in model.layers] == [0, 128] * 24


def test_layers_that_attend_to_everything_may_be_stated() -> None:
    def stated(no_rope_layers: list[int]) -> ModelShape:
        text = SCOUT_CONFIG["text_config"] | {"no_rope_layers": no_rope_layers}
        return llama4_shape(SCOUT_CONFIG | {"text_config": text}, "scout")

    assert stated([1, 1, 1, 0] * 12) == scout()
    assert stated([1] * 47 + [0]).kv_token_bytes == scout().kv_token_bytes // 12
    with pytest.raises(InvalidArgument, match="48 entries"):
        stated([1, 0])


@pytest.mark.parametrize(("cut", "parts"), [(Cut(2), 2), (Cut(2, dp=2), 1)])
def test_a_card_keeps_the_windows_of_one_sequence(cut: Cut, parts: int) -> None:
    """Each of two cards has half of the KV's heads, or all heads for other sequences."""
    model = scout()
    fit = fit_memory(model, cut, CardMemory(parse_cards("2xh200")[1].visible_bytes))
    room_bytes = fit.card_free_bytes - model.kv_window_bytes // parts
    assert fit.kv_tokens == 2 * room_bytes // model.kv_token_bytes


def test_kv_is_divided_over_the_cards_that_hold_no_copy_of_it() -> None:
    """Cards of a part of sequences and positions have the same KV where they are more than heads of KV."""
    model = scout()
    for cut in [cut for n_cards in (1, 8, 32) for cut in enumerate_cuts(model, n_cards)]:
        copies = max(cut.tp // (cut.dp * cut.kv) // model.kv_heads, 1)
        assert kv_shares(model, cut) * copies == cut.tp


def test_step_times_follow_the_published_curve() -> None:
    model, card = kimi(), parse_cards("8xh200")[1]
    # Of an engine that all-reduces in bf16, with vLLM's step of 8,192 rows.
    times = StepTimes(model, Cut(8), cut_stages(model, 1), card, sums=ALL_REDUCED, step_tokens=8192)
    for streams, tokens_per_s in _SPEED.items():
        predicted = 1 / capacity_at(times, Traffic(8192, 0, 1024), streams, "").token_s
        assert predicted == pytest.approx(tokens_per_s, rel=0.15)
        row = f"| {streams} | {tokens_per_s} | {predicted:.1f} | {predicted / tokens_per_s - 1:+.0%} |"
        assert row.replace("% |", " % |") in DOCS
    assert f"One efficiency, {EFFICIENCY}, is fitted" in DOCS


def test_refusal_says_by_how_much() -> None:
    with pytest.raises(
        InvalidArgument, match=r"TP4, the best cut, the fullest card lacks 61\.4\d GiB.*fits 8"
    ):
        make_plan(kimi(), *parse_cards("4xh100"))


def test_too_many_layers_are_refused() -> None:
    text = {**SCOUT_CONFIG["text_config"], "num_hidden_layers": 2**31 - 1}
    with pytest.raises(InvalidArgument, match="num_hidden_layers"):
        llama4_shape({"text_config": text}, "deep")
