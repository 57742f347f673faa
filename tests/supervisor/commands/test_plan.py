"""`slipstream plan` prints cuts and reason, the same as JSON, and what is wrong with its options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from libs.planner.cards import parse_cards
from libs.planner.decode_room import read_draft_head
from libs.planner.plan import make_plan
from libs.planner.runnable import cut_refusals
from libs.planner.shapes.read_shape import read_shape
from libs.planner.traffic import Traffic
from slipstream.cli.app import app
from slipstream.errors import InvalidArgument
from supervisor.commands.plan import plan_document, shown_cuts
from tests.engine.model.release_configs import MOONLIGHT
from tests.planner.shapes import KIMI_CONFIG, KIMI_HEAD, kimi


def run(*flags: str, model: Path = KIMI_CONFIG, gpus: str = "8xh100-80") -> str:
    arguments = ["plan", "--model", str(model), "--gpus", gpus, *flags]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    return done.output


def test_the_table_has_the_best_of_the_cuts_and_the_reason() -> None:
    """Of cuts that differ in the parts of experts only, one; a line counts the others."""
    output = run()
    assert "595.15 GB (554.27 GiB) of weights, 70,272 bytes of KV a token" in output
    plan = make_plan(kimi(), *parse_cards("8xh100-80"))
    shown = shown_cuts(plan)
    assert shown[0] is plan.chosen and len(shown) == 20
    for candidate in shown:
        assert f" {candidate.fit.cut.name} " in output
    assert "DP8 " in output and "does not fit" in output and "+ EP" not in output
    others = len(plan.candidates) - 20
    assert f"{others} other cuts: " in output
    assert plan.reason in output.replace("\n", " ")
    names = [cut["cut"] for cut in json.loads(run("--json"))["cuts"]]
    assert names == [each.fit.cut.name for each in plan.candidates] and "TP2 x DP4 + EP8" in names


def test_a_cut_of_other_engines_is_marked() -> None:
    (row,) = [line for line in run().splitlines() if "queries exchanged" in line]
    assert "961,171" in row and row.rstrip().endswith("not run by this engine")
    (document,) = json.loads(run("--json"))["cuts_of_other_engines"]
    assert document["kv_tokens"] == 961_171 and "requests_per_s" not in document


def test_json_agrees_with_the_plan() -> None:
    document: dict[str, Any] = json.loads(run("--json", "--kv-gib", "30", "--prompt-tokens", "4096"))
    plan = make_plan(kimi(), *parse_cards("8xh100-80"), traffic=Traffic(4096, 0, 1024))
    assert document == plan_document(plan, 30 * 2**30)
    assert document["kv_gib_tokens"] == 458_393
    assert document["chosen"] == plan.chosen.fit.cut.name


def test_what_the_engine_refuses_stands_beside_the_flags() -> None:
    refusals = make_plan(kimi(), *parse_cards("8xh100-80")).worker_refusals()
    assert refusals[0].field == "parallel" and "split KV" in refusals[0].reason
    output = run().replace("\n", " ")
    assert all(f"--{each.field}: {each.reason}" in output for each in refusals)
    listed = json.loads(run("--json"))["worker_refusals"]
    assert listed == [{"flag": f"--{each.field}", "reason": each.reason} for each in refusals]


def test_cuts_that_this_version_runs_are_marked_and_the_best_of_them_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MOONLIGHT))
    plan = make_plan(read_shape(tmp_path), *parse_cards("2xh100-80"), traffic=Traffic(65536, 0, 64))
    flags = ("--prompt-tokens", "65536", "--output-tokens", "64")
    output = run(*flags, model=tmp_path, gpus="2xh100-80")
    for candidate in shown_cuts(plan):
        mark = "no" if cut_refusals(candidate.fit.cut) else "yes"
        rows = [line.lstrip("* ") for line in output.splitlines()]
        (row,) = [row for row in rows if row.startswith(f"{candidate.fit.cut.name}  ")]
        assert row.removeprefix(candidate.fit.cut.name).split()[0] == mark
    document = json.loads(run("--json", *flags, model=tmp_path, gpus="2xh100-80"))
    best = plan.runnable
    assert best is not None and document["runnable"]["cut"] == best.fit.cut.name
    assert document["runnable"]["worker_arguments"]["parallel"] == "tp=1"
    assert [not cut["refusals"] for cut in document["cuts"]] == [
        not cut_refusals(each.fit.cut) for each in plan.candidates
    ]
    assert ("Best that this version runs: " in output) == bool(plan.worker_refusals())


def test_a_choice_that_is_refused_has_the_best_that_runs_beside_it() -> None:
    """The rule of the engine, not of this test, says whether any cut of Kimi-K2.5 runs."""
    plan = make_plan(kimi(), *parse_cards("8xh100-80"))
    output = run().replace("\n", " ")
    if plan.runnable is None:
        assert "This version runs no cut of these cards that serves such a request" in output
        assert json.loads(run("--json"))["runnable"] is None
    elif plan.worker_refusals():
        assert f"Best that this version runs: {plan.runnable.fit.cut.name}, " in output


def test_flags_that_the_engine_takes_have_no_refusal(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MOONLIGHT))
    assert "refuses" not in run(model=tmp_path, gpus="1xh100")
    assert json.loads(run("--json", model=tmp_path, gpus="1xh100"))["worker_refusals"] == []


def test_decode_steps_as_graphs_take_memory_of_each_card(tmp_path: Path) -> None:
    """The page pool of a decode worker with the same flag is as much smaller (test_kv_size.py)."""
    (tmp_path / "config.json").write_text(json.dumps(MOONLIGHT))
    plain, graphs = (
        json.loads(run("--json", *flags, model=tmp_path, gpus="1xh100"))
        for flags in ((), ("--decode-steps", "graphs", "--max-batch", "32"))
    )
    n_bytes = graphs["card_decode_steps_bytes"]
    assert plain["card_decode_steps_bytes"] == 0 and n_bytes > 5e8
    assert plain["node_free_bytes"] - graphs["node_free_bytes"] == n_bytes
    assert plain["cuts"][0]["kv_bytes"] - graphs["cuts"][0]["kv_bytes"] == pytest.approx(n_bytes, rel=1e-3)
    output = run("--decode-steps", "ahead", "--max-batch", "32", model=tmp_path, gpus="1xh100")
    room = f"{n_bytes / 2**30:.2f} for decode steps as graphs (32 sequences with up to 8 drafts)"
    assert room in output.replace("\n", " ")
    assert "A decode worker also takes --decode-steps=ahead --max-batch=32" in output
    assert graphs["decode_worker_arguments"] == {"decode-steps": "graphs", "max-batch": "32"}
    assert plain["decode_worker_arguments"] == {}
    with pytest.raises(InvalidArgument, match="must be plain, graphs or ahead"):
        run("--decode-steps", "fast")


@pytest.mark.parametrize("place", ["local", "service"])
def test_a_draft_head_takes_memory_of_the_card_that_has_it(tmp_path: Path, place: str) -> None:
    """The bytes are those of `tests/planner/test_draft_heads.py`; of one card, as a worker has one head."""
    (tmp_path / "config.json").write_text(json.dumps(KIMI_HEAD))
    head = read_draft_head(tmp_path, kimi(), is_local=place == "local", max_batch=32)
    flags = ("--draft-model", str(tmp_path), "--drafter", place, "--max-batch", "32")
    without = json.loads(run("--json", "--max-batch", "32", gpus="8xh200"))
    found = json.loads(run("--json", *flags, gpus="8xh200"))
    assert without["draft_head"] is None
    parts = found["draft_head"]
    assert (parts["name"], parts["drafter"]) == (tmp_path.name, place)
    assert parts["card_bytes"] == head.card_bytes == without["node_free_bytes"] - found["node_free_bytes"]
    whole = parts["weights_bytes"] + parts["contexts_bytes"] + parts["proposals_bytes"]
    in_card, in_drafter = (whole, 0) if place == "local" else (0, whole)
    assert parts["card_bytes"] == in_card + parts["features_bytes"] and parts["drafter_bytes"] == in_drafter
    assert parts["contexts"] == (64 if place == "local" else 1024)
    free = [
        {cut["cut"]: (cut["card_free_bytes"], cut["stage_layers"]) for cut in document["cuts"]}
        for document in (without, found)
    ]
    assert free[0]["TP8"][0] - free[1]["TP8"][0] == head.card_bytes
    assert found["decode_worker_arguments"] == {"drafter": place, "max-batch": "32"}
    output = run(*flags, gpus="8xh200").replace("\n", " ")
    assert f"draft head {tmp_path.name}, by estimate: " in output
    assert f"{head.head_bytes / 2**30:.2f} GiB ({parts['weights_bytes'] / 2**30:.2f} of weights" in output
    assert ("; a drafter takes " in output) == (place == "service")
    assert f"A decode worker also takes --drafter={place} --max-batch=32" in output


def test_rates_of_more_sequences_than_the_flags_run_are_named(tmp_path: Path) -> None:
    """Kimi-K2.5 serves fewer than 64 at once on these cards, Moonlight with short prompts more."""
    (tmp_path / "config.json").write_text(json.dumps(MOONLIGHT))
    short = ("--prompt-tokens", "128", "--output-tokens", "128")
    sequences = json.loads(run("--json", *short, model=tmp_path, gpus="1xh100"))["cuts"][0]["sequences"]
    assert sequences > 64
    note = f"Its rates count {sequences:,} sequences in a step; these flags run "
    assert f"{note}64 (--max-batch)" in run(*short, model=tmp_path, gpus="1xh100")
    graphs = (*short, "--decode-steps", "graphs", "--max-batch", "32")
    assert "these flags run 32 (--max-batch)" in run(*graphs, model=tmp_path, gpus="1xh100")
    assert "these flags run" not in run()


def test_requests_beyond_the_models_context_are_named() -> None:
    longest = kimi().max_context_tokens
    answer = ("--output-tokens", "1000")
    fitting = run(*answer, "--prompt-tokens", str(longest - 1000), gpus="8xh200")
    assert "Workers refuse" not in fitting
    note = f"Workers refuse requests of {longest + 1:,} tokens: the model's context has {longest:,}"
    assert note in run(*answer, "--prompt-tokens", str(longest - 999), gpus="8xh200").replace("\n", " ")
    document = json.loads(run("--json", gpus="8xh200"))
    assert document["max_context_tokens"] == longest


def test_a_trace_sizes_the_fleet(tmp_path: Path) -> None:
    line = {"timestamp": 0, "input_length": 9000, "output_length": 300, "hash_ids": []}
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps({**line, "timestamp": 250 * n}) + "\n" for n in range(9)))
    output = run("--traffic", str(trace))
    assert "9,000 tokens (0 cached), 300 tokens of answer" in output
    assert "The trace's 4.50 requests/s need" in output


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--gpus", "8xtpu"], "--gpus"),
        (["--gpus", "1xh100"], "--gpus"),
        (
            ["--decode-steps", "graphs", "--max-batch", "65536"],
            "^--decode-steps, --max-batch: .*decode steps",
        ),
        (["--overhead-gib", "70"], "^--overhead-gib: "),
        (["--overhead-gib", "1000000", "--gpus", "1xh100"], "^--gpus: "),
        (["--gpus", "1000000xh100"], "--gpus: the number of cards must be 1 to 64, not 1000000"),
        (["--traffic", "/nonexistent"], "--traffic"),
        (["--model", "/nonexistent"], "--model"),
        (["--cached-tokens", "8192"], "--cached-tokens"),
        (["--draft-model", "/nonexistent"], "--draft-model"),
        (["--model", "/dev/zero"], "--model: cannot read /dev/zero: is no regular file"),
        (["--draft-model", "/dev/zero"], "--draft-model: cannot read /dev/zero: is no regular file"),
        (["--traffic", "/dev/zero"], "--traffic: cannot read /dev/zero: is no regular file"),
        (["--draft-model", str(KIMI_CONFIG)], "--draft-model"),
        (["--drafter", "remote"], "--drafter"),
        (["--drafter", "local"], "--drafter: local needs --draft-model"),
    ],
)
def test_bad_options_are_named(flags: list[str], named: str) -> None:
    arguments = ["plan", "--model", str(KIMI_CONFIG), "--gpus", "8xh100", *flags]
    with pytest.raises(InvalidArgument, match=named):
        CliRunner().invoke(app, arguments, catch_exceptions=False)


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_traffic_that_has_room_in_no_cut_is_shown_and_fails(form: tuple[str, ...]) -> None:
    """The weights fit, and the KV of one such request does not."""
    flags = ["--model", str(KIMI_CONFIG), "--gpus", "8xh100-80", "--prompt-tokens", "5000000", *form]
    done = CliRunner().invoke(app, ["plan", *flags])
    assert isinstance(done.exception, InvalidArgument) and done.exit_code == 1
    plan = make_plan(kimi(), *parse_cards("8xh100-80"), traffic=Traffic(5_000_000, 0, 1024))
    most = max(each.fit.kv_tokens for each in plan.candidates)
    assert "it has 5,001,024 tokens, and a worker of " in done.exception.message
    assert done.exception.message.endswith(f"the cut with the most room, holds {most:,}")
    if form:
        assert json.loads(done.output)["chosen"] == plan.chosen.fit.cut.name
    else:
        assert plan.reason in done.output and f" {plan.chosen.fit.cut.name} " in done.output


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        *(
            (flag, value)
            for flag in ("--max-token-ms", "--overhead-gib", "--kv-gib")
            for value in ("inf", "nan")
        ),
        *((flag, "9" * 400) for flag in ("--prompt-tokens", "--output-tokens", "--max-batch")),
    ],
)
def test_a_number_without_end_is_refused_by_its_flag(flag: str, value: str) -> None:
    done = CliRunner().invoke(app, ["plan", "--model", str(KIMI_CONFIG), "--gpus", "8xh100-80", flag, value])
    assert done.exit_code == 2 and flag in done.output
