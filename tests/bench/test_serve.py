"""The serving benchmark's command line; its figures are tested in test_load.py."""

from __future__ import annotations

import pytest

from bench.request_log import RequestLog
from bench.serve import __main__ as serve
from bench.serve.drafts import DraftsWay, sample_of, speed_ratio
from tests.support.processes.etcd_process import free_port


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--streams", "a"], "no list of stream counts"),
        (["--streams", "1,0"], "no list of stream counts"),
        (["--make", "somewhere"], "need --up"),
        (["--rate", "0"], "must be more than 0"),
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
