"""What this version runs of a plan: the rule of the engine, asked of every cut."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from libs.engine.parallel.limits import group_refusals
from libs.planner.cards import parse_cards
from libs.planner.cuts import PAGE_TOKENS, Cut, enumerate_cuts, reference_cuts
from libs.planner.decode_room import DecodeStepRoom
from libs.planner.nodes import worker_nodes
from libs.planner.plan import Plan, make_plan
from libs.planner.runnable import cut_refusals
from libs.planner.shapes.read_shape import read_shape
from tests.engine.model.release_configs import MOONLIGHT
from tests.planner.shapes import kimi


def moonlight(folder: Path, gpus: str) -> Plan:
    (folder / "config.json").write_text(json.dumps(MOONLIGHT))
    return make_plan(read_shape(folder), *parse_cards(gpus))


@given(n_cards=st.sampled_from([1, 2, 4, 8, 16]), data=st.data())
def test_a_cut_is_refused_for_what_a_worker_with_its_flags_is_refused(
    n_cards: int, data: st.DataObject
) -> None:
    cut = data.draw(st.sampled_from(list(enumerate_cuts(kimi(), n_cards))))
    found = [(each.field, each.reason) for each in cut_refusals(cut)]
    wanted = group_refusals(
        cut.sizes, device="cuda", kernels="triton", block_tokens=PAGE_TOKENS, n_machines=worker_nodes(cut)
    )
    assert found == [(each.field, each.reason) for each in wanted]


def test_one_card_a_worker_runs_and_what_other_engines_cut_does_not() -> None:
    assert cut_refusals(Cut(1)) == cut_refusals(Cut(1, replicas=8)) == []
    (reference,) = reference_cuts(kimi(), 8)
    assert cut_refusals(reference)


def test_the_best_that_runs_is_the_first_served_cut_without_refusals(tmp_path: Path) -> None:
    """A card holds the model, so replicas of one card run, whatever the choice among all cuts is."""
    plan = moonlight(tmp_path, "2xh100-80")
    best = plan.runnable
    assert best is not None and best.capacity is not None and not cut_refusals(best.fit.cut)
    for better in plan.candidates[: plan.candidates.index(best)]:
        assert better.capacity is None or cut_refusals(better.fit.cut)
    assert best.fit.cut == Cut(1, replicas=2)
    assert plan.worker_arguments(best)["parallel"] == "tp=1"
    assert plan.pod_resources(best)["nvidia.com/gpu"] == "1"


def test_without_a_card_that_holds_the_model_only_groups_may_run() -> None:
    plan = make_plan(kimi(), *parse_cards("8xh100-80"))
    runs = [each for each in plan.candidates if each.capacity and not cut_refusals(each.fit.cut)]
    assert plan.runnable == (runs[0] if runs else None)
    assert plan.chosen.fit.cut.group_cards > 1


def test_groups_of_cards_run_without_graphs_only() -> None:
    group = Cut(8)
    assert not cut_refusals(group)
    (refusal,) = cut_refusals(group, decode_steps="graphs")
    assert refusal.field == "decode_steps"
    steps = DecodeStepRoom(64)
    assert make_plan(kimi(), *parse_cards("8xh200"), decode_steps=steps).runnable is None
    assert make_plan(kimi(), *parse_cards("8xh200")).runnable is not None
