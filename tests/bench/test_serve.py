"""The serving benchmark's command line; its figures are tested in test_load.py."""

from __future__ import annotations

import pytest

from bench.serve import __main__ as serve
from tests.support.processes.etcd_process import free_port


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--streams", "a"], "no list of stream counts"),
        (["--streams", "1,0"], "no list of stream counts"),
        (["--make", "somewhere"], "need --up"),
        (["--rate", "0"], "must be more than 0"),
        (["--up", "--endpoint", "127.0.0.1:1"], "not allowed with"),
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
