"""Draft heads on a device against the same heads on a CPU, and a decode engine that feeds one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from libs.engine.core.build import (
    EngineOptions,
    build_drafter,
    build_engine,
    build_local_drafter,
)
from libs.engine.eagle.drafter import DrafterEngine
from libs.engine.eagle.head_memory import read_head_memory
from libs.engine.kernels.device import open_triton_kernels
from libs.engine.kernels.torch_kernels import TorchKernels
from libs.engine.step.device_rows import DeviceRows
from libs.engine.step.types import SamplingParams, SequenceSpec
from services.decode.local_speculation import LocalSpeculation
from tests.engine.eagle.random_heads import WRITERS, extend_heads
from tests.engine.random_latent_head import RandomLatentHead, write_random_latent_head
from tests.support.random_checkpoint import RandomCheckpoint, write_random_checkpoint

pytestmark = pytest.mark.gpu
N_DRAFTS = 5


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    write_random_checkpoint(path, RandomCheckpoint(dtype="float32"))
    return path


@pytest.fixture(autouse=True)
def exact_products(cuda: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """fp32 without TF32."""
    pytest.importorskip("triton", reason="Triton is missing: pip install 'slipstream-server[gpu]'")
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


def on_cpu(head_dir: Path, target_dir: Path) -> DrafterEngine:
    return build_drafter(head_dir, target_dir, kernels=TorchKernels())


@pytest.mark.parametrize("kind", WRITERS)
def test_drafts_in_fp32_equal_those_of_a_cpu(cuda: str, tmp_path: Path, target_dir: Path, kind: str) -> None:
    WRITERS[kind](tmp_path)
    kernels = open_triton_kernels(torch.device(cuda), torch.float32)
    heads = [on_cpu(tmp_path, target_dir), build_drafter(tmp_path, target_dir, kernels=kernels)]
    names = extend_heads(list(heads), seed=1)
    wanted, found = (head.propose_batch(names, N_DRAFTS) for head in heads)
    assert found == wanted
    for least in (0.003, 0.01):
        wanted, found = (head.propose_batch(names, N_DRAFTS, min_confidence=least) for head in heads)
        assert found == wanted


@pytest.mark.parametrize("kind", WRITERS)
def test_most_first_drafts_in_bf16_are_those_of_a_cpu(
    cuda: str, tmp_path: Path, target_dir: Path, kind: str
) -> None:
    """Random heads have near ties, which rounding turns over; a wrong context turns over nearly all."""
    WRITERS[kind](tmp_path)
    heads = [on_cpu(tmp_path, target_dir), build_drafter(tmp_path, target_dir, device=cuda)]
    n_equal = n_all = 0
    for seed in range(8):
        names = extend_heads(list(heads), seed=seed)
        wanted, found = (head.propose_batch(names, 1) for head in heads)
        n_all += len(names)
        n_equal += sum(wanted[name] == found[name] for name in names)
        for head in heads:
            for name in names:
                head.close(name)
    assert n_equal >= 0.8 * n_all


@pytest.mark.parametrize("kind", WRITERS)
def test_a_head_takes_no_more_memory_than_is_counted(
    cuda: str, tmp_path: Path, target_dir: Path, kind: str
) -> None:
    WRITERS[kind](tmp_path)
    build_drafter(tmp_path, target_dir, device=cuda)  # programs, and the workspace of cuBLAS
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(cuda)
    torch.cuda.reset_peak_memory_stats(cuda)
    head = build_drafter(tmp_path, target_dir, device=cuda)
    names = extend_heads([head], seed=1)
    head.propose_batch(names, N_DRAFTS)
    taken = torch.cuda.max_memory_allocated(cuda) - before
    assert taken <= read_head_memory(tmp_path).n_bytes(len(names))


@pytest.mark.parametrize("decode_steps", ["plain", "graphs"])
def test_an_engine_gives_its_head_features_on_the_device(
    cuda: str, tmp_path: Path, target_dir: Path, decode_steps: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text is that of the same engine without drafts, and no feature passes through the host."""
    monkeypatch.setattr("services.decode.draft_control.DEFAULT_CONFIDENCE", 0.0)  # a random head is unsure
    write_random_latent_head(tmp_path, RandomLatentHead())
    engine = build_engine(
        target_dir,
        EngineOptions(
            n_pages=8,
            device=cuda,
            compute_dtype="float32",
            draft_model_dir=tmp_path,
            features_on_device=True,
            max_batch=2,
            max_draft_tokens=3,
            decode_steps="graphs" if decode_steps == "graphs" else "plain",
        ),
    )
    speculation = LocalSpeculation(draft_tokens=3)
    speculation.load(build_local_drafter(engine, tmp_path, target_dir))
    sampling = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    prompt = np.arange(40, dtype=np.uint32)
    texts, n_proposed = [], 0
    for name, drafts_on in (("with", True), ("without", False)):
        engine.reserve(SequenceSpec(seq_id=name, prompt=prompt, sampling=sampling))
        engine.start(name)
        speculation.open(name)
        tokens: list[int] = []
        while len(tokens) < sampling.max_tokens:
            outputs = engine.step(speculation.drafts() if drafts_on else {}, features=drafts_on)
            if drafts_on:
                speculation.stepped(outputs)
            for output in outputs:
                tokens += output.tokens
                n_proposed += output.proposed_drafts
                assert output.features is None or isinstance(output.features, DeviceRows)
        engine.release(name)
        texts.append(tokens)
    assert texts[0] == texts[1] and n_proposed > 0
