"""The fleet view on terminals of any size."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.cli.top.rows import SORTS, FleetRows, sorted_rows, view_dict, view_of
from slipstream.cli.top.screen import KEYS, DrainQuestion, ScreenState, last_offset, screen_lines
from slipstream.v1 import fleet_pb2
from tests.cli.fleet.fleet_port import DRAINING, process

STATE = ScreenState("127.0.0.1:7001", "12:00:00")


def fleet(n_decode: int) -> FleetRows:
    router = process(
        "router", requests_running=3, requests_waiting=1, requests_per_s=2.5, generated_tokens_per_s=1500
    )
    busy = [
        process(
            "decode",
            n,
            requests_running=n,
            blocks_held=n,
            blocks_free=300 - n,
            decode_step_ms=10.0 + n,
            generated_tokens_per_s=100.0,
            busy_share=0.5,
        )
        for n in range(n_decode)
    ]
    answer = fleet_pb2.GetFleetResponse(
        router="router-0", model="helper", processes=[*busy, process("prefill"), router]
    )
    return view_of(answer)


def texts(view: FleetRows | None, state: ScreenState, width: int, height: int | None) -> list[str]:
    return [line.plain for line in screen_lines(view, state, width=width, height=height)]


def test_a_screen_of_80_columns_has_requests_tiers_and_processes() -> None:
    lines = texts(fleet(2), STATE, 80, 24)
    assert lines[0] == "helper  router-0 at 127.0.0.1:7001  12:00:00  by tier"
    assert lines[1] == "requests 3 running, 1 queued, 2.5/s; tokens 0/s in, 1.5k/s out"
    tier = next(line for line in lines if line.startswith("decode "))
    assert tier.split() == ["decode", "2/2", "1", "0", "0%", "0", "200", "10.5", "50%"]
    worker = next(line for line in lines if line.startswith("decode-1 "))
    assert worker.split() == ["decode-1", "ready", "1", "0", "0%", "0", "100", "11.0", "50%"]
    silent = next(line for line in lines if line.startswith("prefill-0"))
    assert silent.split()[2:] == ["-"] * 7
    assert lines[-1] == KEYS and len(lines) == 24


def test_a_hundred_workers_scroll_to_the_last_one() -> None:
    view = fleet(100)
    first = texts(view, STATE, 80, 24)
    assert "decode-0" in first[12] and not any(line.startswith("decode-99 ") for line in first)
    assert first[-1].endswith(f"1-{24 - 11} of 102")
    state = ScreenState("r:1", "", offset=last_offset(view, height=24))
    last = texts(view, state, 80, 24)
    assert last[-2].startswith("decode-99 ") and last[-1].endswith("of 102")
    assert len(texts(view, STATE, 80, None)) > 102


@given(st.integers(1, 200), st.integers(1, 60), st.integers(0, 30), st.sampled_from(SORTS))
def test_no_line_is_longer_than_the_terminal_and_no_screen_higher(
    width: int, height: int, n_decode: int, sort: str
) -> None:
    for view in (fleet(n_decode), None):
        state = ScreenState(
            "host:1", "12:00:00", sort, trouble="gone", offset=last_offset(view, height=height)
        )
        lines = texts(view, state, width, height)
        assert max(map(len, lines)) <= width
        assert len(lines) <= max(height, 2)


def test_a_router_that_does_not_answer_leaves_the_last_figures_and_says_why() -> None:
    state = ScreenState("r:1", "12:00:00", is_paused=True, trouble="connection refused")
    lines = texts(fleet(1), state, 80, 24)
    assert lines[0].endswith("paused")
    assert lines[1] == "no answer, asks again: connection refused"
    assert any(line.startswith("decode-0") for line in lines)
    assert texts(None, state, 80, 24)[1] == "connection refused"


def test_a_tier_without_processes_keeps_its_row_and_no_decode_worker_is_said() -> None:
    lines = texts(fleet(0), STATE, 120, 24)
    assert lines[1].startswith("no decode worker is ready; requests 3 running")
    rows = {line.split()[0]: line.split()[1:] for line in lines if line}
    assert rows["decode"] == rows["kvstore"] == ["0/0"] + ["-"] * 7
    assert rows["prefill"][0] == "1/1" and "drafter" not in rows
    tiers: Any = view_dict(fleet(0), "tier")["tiers"]
    assert [(tier["tier"], tier["ready"], tier["processes"]) for tier in tiers] == [
        ("router", 1, 1), ("prefill", 1, 1), ("decode", 0, 0), ("kvstore", 0, 0),
    ]  # fmt: skip


def test_decode_workers_that_all_drain_are_said_too() -> None:
    drains = process("decode", requests_running=4)
    drains.state = DRAINING
    view = view_of(fleet_pb2.GetFleetResponse(processes=[drains, process("router", requests_running=1)]))
    assert texts(view, STATE, 120, 24)[1].startswith("no decode worker is ready; requests 1 running")
    assert "no decode worker" not in texts(fleet(1), STATE, 120, 24)[1]


def test_sorts_put_the_largest_first_and_the_unknown_last() -> None:
    rows = fleet(12).processes
    assert [row.instance for row in sorted_rows(rows, "tier")][:3] == ["router-0", "prefill-0", "decode-0"]
    for sort in ("load", "kv", "step"):
        assert sorted_rows(rows, sort)[0].instance == "decode-11", sort
        assert sorted_rows(rows, sort)[-1].instance == "prefill-0"
    assert sorted_rows(rows, "tokens")[0].instance == "router-0"


def test_a_process_that_drains_is_not_ready() -> None:
    drains = process("decode", requests_running=4)
    drains.state = DRAINING
    view = view_of(fleet_pb2.GetFleetResponse(processes=[drains]))
    (tier,) = [tier for tier in view.tiers if tier.tier == "decode"]
    assert (tier.ready, tier.processes) == (0, 1)
    assert view_dict(view, "tier")["processes"][0]["state"] == "draining"  # type: ignore[index]


@pytest.mark.parametrize("name", ["x" * 128, "a"])
def test_long_names_are_cut_and_figures_stay_in_their_columns(name: str) -> None:
    named = process("decode", requests_running=7)
    named.instance = name
    view = view_of(fleet_pb2.GetFleetResponse(processes=[named]))
    row = texts(view, STATE, 80, 24)[9]
    assert row.split()[1:3] == ["ready", "7"] and len(row) <= 80


def test_the_chosen_process_is_marked_and_a_question_or_a_note_takes_the_place_of_the_keys() -> None:
    view = fleet(3)
    chosen = ScreenState("r:1", "", chosen="decode/decode-1")
    lines = screen_lines(view, chosen, width=80, height=24)
    marked = [line.plain for line in lines if any(span.style == "reverse" for span in line.spans)]
    assert [line.split()[0] for line in marked] == ["decode-1"]
    row = next(row for row in view.processes if row.instance == "decode-2")
    asked = ScreenState("r:1", "", question=DrainQuestion(row, drains=True), note="old")
    assert texts(view, asked, 80, 24)[-1] == "Drain decode-2, which runs 2? y yes, any other key no"
    undone = ScreenState("r:1", "", question=DrainQuestion(row, drains=False))
    assert texts(view, undone, 80, 24)[-1] == "Undrain decode-2? y yes, any other key no"
    assert (
        texts(view, ScreenState("r:1", "", note="decode-2 is drained"), 80, 24)[-1] == "decode-2 is drained"
    )
