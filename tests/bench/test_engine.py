"""The engine benchmark on a tiny checkpoint: it runs, counts tokens right, and prints its figures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench.engine import __main__ as bench_engine
from tests.support.random_checkpoint import TINY_CONFIG, RandomCheckpoint, write_random_checkpoint

QUICK = ["--prefill-tokens", "32", "--batches", "1,3", "--prompt-tokens", "8", "--output-tokens", "4"]


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(bench_engine, "BENCH_CONFIG", TINY_CONFIG)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_makes_measures_and_compares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--make",
        str(tmp_path / "made"),
        "--peer",
        "transformers",
        "--repeats",
        "1",
        "--threads",
        "1",
    ]
    assert bench_engine.main([*arguments, *QUICK, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["dtype"] == "bfloat16"
    assert set(result["tokens_per_s"]) == {"slipstream", "transformers"}
    for rates in result["tokens_per_s"].values():
        assert set(rates) == {"prefill", "decode_1", "decode_3"}
        assert all(rate > 0 for rate in rates.values())
    assert set(result["ratio"]) == {"prefill", "decode_1", "decode_3"}
    arguments = ["--model", str(tmp_path / "made"), "--repeats", "1", "--threads", "1", "--dtype", "float32"]
    assert bench_engine.main([*arguments, *QUICK]) == 0
    assert "decode_3" in capsys.readouterr().out


def test_two_checkpoints_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_random_checkpoint(tmp_path / "int4", RandomCheckpoint(quantization="int4"))
    write_random_checkpoint(tmp_path / "bf16", RandomCheckpoint(quantization="none"))
    arguments = ["--model", str(tmp_path / "int4"), "--peer-model", str(tmp_path / "bf16")]
    assert bench_engine.main([*arguments, "--repeats", "1", "--threads", "1", *QUICK, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result["tokens_per_s"]) == {"slipstream", "bf16"}
    assert set(result["ratio"]) == {"prefill", "decode_1", "decode_3"}
    with pytest.raises(SystemExit):
        bench_engine.main([*arguments, "--peer", "float32"])
    assert "--peer and --peer-model exclude each other" in capsys.readouterr().err


def test_arguments_that_make_no_sense(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--model", "x", "--output-tokens", "1"], ["--model", "x", "--threads", "0"]):
        with pytest.raises(SystemExit):
            bench_engine.main(arguments)
    assert "--model" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        bench_engine.main(["--model", "x", "--batches", "1;8"])
    assert "no list of batch sizes" in capsys.readouterr().err
    with pytest.raises(SystemExit, match=r"^bench.engine: .*cannot read nowhere/config.json"):
        bench_engine.main(["--model", "nowhere"])


@pytest.mark.parametrize("flag", ["--model", "--peer-model"])
def test_a_wrong_directory_is_named_by_its_flag(tmp_path: Path, flag: str) -> None:
    write_random_checkpoint(tmp_path / "model", RandomCheckpoint())
    directories = {"--model": tmp_path / "model", "--peer-model": tmp_path / "model", flag: tmp_path / "none"}
    with pytest.raises(SystemExit, match=rf"^bench\.engine: {flag}: cannot read {tmp_path}/none/config.json"):
        bench_engine.main([text for pair in directories.items() for text in map(str, pair)])
