"""How the outcomes of a chaos run are judged."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import aiohttp
from aiohttp import web

from bench.chaos.clients import ask_http
from bench.chaos.leftovers import Sample, excesses, growth, leftover_files, temporary_files_in
from bench.chaos.outcome import HTTP, SDK, Outcome
from bench.chaos.prompts import prompts
from bench.chaos.report import judge, report

EXPECTED = ["right"]


def _outcome(
    api: str = SDK, *, text: str = "right", error: str = "", router: str = "", is_lost: bool = True
) -> Outcome:
    return Outcome(api, 0, 10.0, router, 12.0, text, error, is_lost, 0, [10.5, 10.6, 11.6])


def test_a_wrong_text_and_a_failure_over_the_sdk_never_hold() -> None:
    assert judge([_outcome(), _outcome(HTTP)], EXPECTED, {}).holds
    wrong = judge([_outcome(text="wrong")], EXPECTED, {})
    assert not wrong.holds and len(wrong.wrong) == 1
    failed = judge([_outcome(error="Unavailable: gone")], EXPECTED, {"": [(0.0, 99.0)]})
    assert not failed.holds and report([], failed)["failed_sdk"] == {"Unavailable: gone": 1}


def test_a_failure_over_http_is_excused_only_while_its_router_was_down() -> None:
    failed = [_outcome(HTTP, error="cut", router="router-0")]
    assert judge(failed, EXPECTED, {"router-0": [(11.0, 20.0)]}).holds
    assert not judge(failed, EXPECTED, {"router-0": [(12.5, 20.0)], "router-1": [(0.0, 99.0)]}).holds
    said = [_outcome(HTTP, error="status 500: defect", router="router-0", is_lost=False)]
    assert not judge(said, EXPECTED, {"router-0": [(11.0, 20.0)]}).holds


async def test_an_answer_that_names_a_time_is_asked_for_again(unused_tcp_port: int) -> None:
    answers = [
        web.Response(status=503, headers={"Retry-After": "0"}),
        web.Response(text='data: {"choices": [{"delta": {"content": "right"}}]}\n\ndata: [DONE]\n\n'),
        web.Response(status=503),
    ]

    async def answer(_request: web.Request) -> web.Response:
        return answers.pop(0)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", unused_tcp_port).start()
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{unused_tcp_port}") as http:
            first, second = [await ask_http(http, prompts(1), 0, router="r", model="m") for _ in range(2)]
    finally:
        await runner.cleanup()
    assert (first.text, first.error, first.n_refused) == ("right", "", 1)
    assert second.error.startswith("status 503") and not second.is_lost


def test_the_report_has_the_longest_stall_of_each_answer() -> None:
    outcomes = [_outcome(), _outcome(error="cut")]
    found = report(outcomes, judge(outcomes, EXPECTED, {}))
    assert found["requests"] == {SDK: 2, HTTP: 0} and found["answered"] == 1
    assert found["stall_s"] == {SDK: {"p50": 1.0, "p90": 1.0, "p99": 1.0, "max": 1.0}, HTTP: {}}


def test_growth_is_a_slope_after_the_warm_part() -> None:
    samples = [{"decode-0": Sample(60.0 * n, 50_000_000 * (n > 1) + 1_000_000 * n, 20)} for n in range(20)]
    assert growth(samples) == {"decode-0": {"rss_mb_per_hour": 60.0, "descriptors_per_hour": 0.0}}
    assert growth([]) == {}


def test_descriptors_slopes_and_ended_processes_are_excesses() -> None:
    began = {name: Sample(0.0, 1, 20) for name in ("decode-0", "router-0", "router-1")}
    ended = {"decode-0": Sample(0.0, 1 << 40, 36), "router-0": Sample(0.0, 1, 37)}
    assert excesses(began, ended, {}) == ["router-0 has 17 descriptors more", "router-1 does not run"]
    fast = {"rss_mb_per_hour": 100.1, "descriptors_per_hour": 16.1}
    slow = {"rss_mb_per_hour": 100.0, "descriptors_per_hour": 16.0}
    assert excesses(began, began, {"decode-0": slow}) == []
    assert excesses(began, began, {"decode-0": fast}) == [
        "decode-0 grows by 100.1 MB an hour",
        "decode-0 opens 16.1 descriptors an hour",
    ]


def test_temporary_files_of_processes_are_found(tmp_path: Path) -> None:
    program = "import os, tempfile; os.close(tempfile.mkstemp()[0]); tempfile.mkdtemp()"
    with temporary_files_in(tmp_path / "tmp"):
        subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    [left] = leftover_files(tmp_path / "tmp")
    assert left.startswith(f"{tmp_path}/tmp/tmp") and os.environ.get("TMPDIR") != str(tmp_path / "tmp")
    (tmp_path / "segment.tmp").touch()
    assert leftover_files(tmp_path, ends=".tmp") == [str(tmp_path / "segment.tmp")]
