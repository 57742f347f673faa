"""The parts of bench.headline that decide: arrivals, words, the comparison."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.headline.__main__ import parse
from bench.headline.agents import AgentLoad, arrivals_s, words_of
from bench.headline.report import as_table, compare, knee
from bench.headline.variants import COMPARISONS, cluster_of, options_of

LOAD = AgentLoad(
    rate_per_s=2.0,
    sessions=400,
    turns=3,
    first_prompt_tokens=300,
    turn_tokens=30,
    output_tokens=8,
    think_s=0.0,
    seed=7,
    tokens_per_word=3.0,
)


def test_sessions_arrive_at_the_rate_and_equally_for_each_variant() -> None:
    times = arrivals_s(LOAD)
    assert times == arrivals_s(LOAD) and list(times) == sorted(times)
    assert times[-1] == pytest.approx(LOAD.sessions / LOAD.rate_per_s, rel=0.2)
    assert arrivals_s(replace(LOAD, seed=8)) != times


def test_prompts_have_their_length_in_tokens_and_share_no_prefix() -> None:
    assert len(words_of(LOAD, 0, 0).split()) == 100
    assert len(words_of(LOAD, 0, 1).split()) == 10
    assert words_of(LOAD, 0, 0)[:40] != words_of(LOAD, 1, 0)[:40]


def report(p90: float, share: float) -> dict[str, object]:
    return {"itl_ms": {"p90": p90}, "goodput_share": share, "failed": 0}


def test_rows_have_medians_and_the_ratio_of_first_to_second() -> None:
    rows = compare([report(10, 1.0), report(12, 1.0), report(50, 1.0)], [report(60, 0.5)])
    by_title = {row["figure"]: row for row in rows}
    row = by_title["time between tokens p90, ms"]
    assert (row["first"], row["second"], row["ratio"]) == (12.0, 60.0, 0.2)
    assert by_title["TTFT p50, ms"]["first"] is None
    assert by_title["failed requests"]["ratio"] is None
    assert "0.2" in as_table(["tiers", "colocated"], rows)


def test_the_knee_is_the_first_rate_at_which_the_second_variant_falls_behind() -> None:
    rows = {rate: compare([report(1, 1.0)], [report(1, share)]) for rate, share in ((0.2, 0.9), (0.1, 0.99))}
    assert knee(rows, least_share=0.95) == 0.2
    assert knee(rows, least_share=0.5) is None


def test_both_variants_have_as_many_workers(tmp_path: object) -> None:
    for variants in COMPARISONS.values():
        clusters = [
            cluster_of(variant, run_dir=tmp_path, model=tmp_path, prefill=2, decode=3)  # type: ignore[arg-type]
            for variant in variants
        ]
        assert {cluster.prefill + cluster.decode for cluster in clusters} == {5}


def test_without_affinity_the_turns_of_a_session_take_the_workers_in_turn() -> None:
    on, off = (options_of(variant, ["prefill-0", "prefill-1"]) for variant in COMPARISONS["affinity"])
    assert on(3, 0) == on(3, 1) == {"session": "agent-3"}
    workers = [dict(off(3, turn))["headers"]["x-slipstream-prefill"] for turn in range(3)]  # type: ignore[index]
    assert workers == ["prefill-1", "prefill-0", "prefill-1"]


@pytest.mark.parametrize("rates", ["", "0", "-1,2", "fast"])
def test_odd_rates_are_refused(rates: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse([f"--rates={rates}"])
    assert "rates such as" in capsys.readouterr().err
