"""The serving benchmark's command line; its figures are tested in test_load.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.request_log import RequestLog
from bench.serve import __main__ as serve
from bench.serve.drafts import DraftsWay, sample_of, speed_ratio
from bench.serve.prompt_lengths import as_table, long_context_model, report_of
from libs.text.tokenizer import Tokenizer
from supervisor.configuration.cluster_options import DEFAULT_MODEL
from tests.support.processes.etcd_process import free_port


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--streams", "a"], "no list of stream counts"),
        (["--streams", "1,0"], "no list of stream counts"),
        (["--make", "somewhere"], "need --up"),
        (["--rate", "0"], "must be more than 0"),
        (["--prompt-tokens", "128,0"], "no list of prompt lengths"),
        (["--streams", "1", "--prompt-tokens", "128,256"], "takes one number of --prompt-tokens"),
        (["--up", "--endpoint", "127.0.0.1:1"], "not allowed with"),
        (["--drafts", "off,auto"], "--drafts needs --up"),
        (["--up", "--drafts", "off,sometimes"], "'sometimes' is none of"),
        (["--up", "--drafts", "on:elsewhere"], "'on:elsewhere' is none of"),
    ],
)
def test_arguments_that_make_no_sense(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        serve.parse(arguments)
    assert said in capsys.readouterr().err


def test_stream_counts() -> None:
    assert serve.parse(["--streams", "1,8,32"]).streams == [1, 8, 32]


def test_prompt_tokens_are_lengths_without_streams() -> None:
    alone = serve.parse(["--prompt-tokens", "128,8192"])
    assert alone.lengths == [128, 8192]
    streams = serve.parse(["--streams", "1", "--prompt-tokens", "256"])
    assert (streams.lengths, streams.prompt_tokens) == ([], [256])
    assert (serve.parse([]).lengths, serve.parse([]).prompt_tokens) == ([], [128])


def test_a_length_has_both_turns_and_the_memory_of_each_role() -> None:
    cold = RequestLog(1.0, [(3.0, 1), (3.5, 2)], prompt_tokens=8192)
    second = RequestLog(4.0, [(4.25, 1), (4.75, 2)], prompt_tokens=8230, cached_tokens=8128)
    report = report_of(cold, second)
    assert report == {
        "workload": "prompt_tokens",
        "prompt_tokens": 8192,
        "ttft_ms": 2000.0,
        "itl_ms": 500.0,
        "second_ttft_ms": 250.0,
        "second_itl_ms": 500.0,
        "second_cached_tokens": 8128,
        "failed": 0,
        "errors": [],
    }
    failed = report_of(cold, RequestLog(4.0, error="Unavailable"))
    assert failed["errors"] == ["Unavailable"] and failed["second_ttft_ms"] is None
    lines = as_table([report | {"memory_mb": {"prefill": 1024}}, failed | {"memory_mb": {"prefill": 7}}])
    assert [line.split()[-1] for line in lines.splitlines()] == ["MB", "1,024", "7"]
    assert lines.splitlines()[2].split()[3] == "-"
    assert as_table([report]).splitlines()[1].split()[-1] == "500.0"


def test_a_longer_window_changes_nothing_else_of_a_model(tmp_path: Path) -> None:
    target = long_context_model(DEFAULT_MODEL, tmp_path / "long", 262_144)
    config = json.loads((target / "config.json").read_text())
    assert config.pop("max_position_embeddings") == 262_144
    assert config.items() <= json.loads((DEFAULT_MODEL / "config.json").read_text()).items()
    assert {path.name for path in target.iterdir()} == {path.name for path in DEFAULT_MODEL.iterdir()}
    assert Tokenizer.from_dir(target).encode_text("help") == Tokenizer.from_dir(DEFAULT_MODEL).encode_text(
        "help"
    )


def test_no_router_and_no_model_end_it_with_one_line() -> None:
    with pytest.raises(SystemExit, match=r"^bench.serve: "):
        serve.main(["--endpoint", f"127.0.0.1:{free_port()}"])
    with pytest.raises(SystemExit, match=r"^bench.serve: --model: no model in .*nowhere"):
        serve.main(["--up", "--model", "nowhere"])


def test_a_round_counts_from_the_first_token() -> None:
    log = RequestLog(0.0, arrivals=[(1.0, 1), (1.2, 5), (1.4, 9)], completion_tokens=9, decode_steps=2)
    sample = sample_of([log, RequestLog(0.0, error="Unavailable")], wall_s=2.0, cpu_s=0.9)
    assert sample == {
        "ms_per_token": pytest.approx(50),
        "tokens_per_s": 4.5,
        "cpu_ms_per_token": pytest.approx(100),
        "tokens_per_step": 4,
        "failed": 1,
    }


def test_ratios_are_those_of_rounds() -> None:
    off = [{"ms_per_token": ms} for ms in (2.0, 4.0, 20.0)]
    on = [{"ms_per_token": ms} for ms in (1.0, 2.0, 40.0)]
    assert speed_ratio(on, off) == 2.0
    assert DraftsWay.parse("auto:local").name == "auto:local"
