"""The weights of a device, as a load puts them there: each once, and rows of a checkpoint in pieces."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tests.engine.kernels.gpu.interpreted  # noqa: F401  (before the programs)
from libs.engine.kernels.gpu import expert_weights
from libs.engine.kernels.gpu.expert_weights import repack_int4, stack_dense, stack_experts
from libs.engine.kernels.gpu.triton_kernels import TritonKernels
from libs.engine.model.checkpoint import Checkpoint
from libs.engine.model.shards import CheckpointError
from libs.engine.model.tensor_rows import copy_finite_into
from libs.engine.model.weights import ModelWeights, WeightLoader
from libs.engine.model_spec.matrix import DenseMatrix
from tests.engine.kernels.test_kernels import normal
from tests.engine.model.test_checkpoint import edit_checkpoint
from tests.support.live_bytes import LiveBytes
from tests.support.quantize import pack_int4
from tests.support.random_checkpoint import TINY_CONFIG, RandomCheckpoint, write_random_checkpoint

CPU = torch.device("cpu")
# One layer of experts is most of the model, and embedding and head are larger than all pieces together.
SHAPE = {
    "vocab_size": 8192,
    "hidden_size": 128,
    "moe_intermediate_size": 256,
    "n_routed_experts": 48,
    "num_hidden_layers": 2,
}
PIECE_VALUES = 8 << 10
# Of a piece the host has nibbles, words and fp32 values for a moment; of the router it has fp32.
ROOM_BYTES = 20 * PIECE_VALUES


@pytest.mark.parametrize("quantization", ["int4", "none", "fp8"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_no_layer_is_in_memory_twice(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    quantization: Literal["int4", "none", "fp8"],
    is_tied: bool,
) -> None:
    monkeypatch.setattr(expert_weights, "_PIECE_VALUES", PIECE_VALUES)
    shape = TINY_CONFIG | SHAPE | {"tie_word_embeddings": is_tied}
    config = write_random_checkpoint(tmp_path, RandomCheckpoint(shape, quantization=quantization))
    kernels, kept = TritonKernels(CPU, torch.bfloat16), list[ModelWeights]()
    live = LiveBytes()
    with Checkpoint(tmp_path) as checkpoint, torch.inference_mode(), live:
        kept.append(WeightLoader(checkpoint, config, kernels).load())
    values = (2 if quantization != "int4" else 4.5 / 8) * 48 * 3 * 128 * 256
    assert live.held_bytes > values, "the experts are there"
    assert live.peak_bytes - live.held_bytes < ROOM_BYTES < values / 3


@given(st.integers(1, 9), st.integers(1, 40), st.integers(1, 40), st.sampled_from([8, 16, 32]), st.booleans())
def test_pieces_make_up_the_stack(
    piece_rows: int, upper: int, lower: int, group: int, is_mixed: bool
) -> None:
    cols = 3 * group
    whole = [[pack_int4(normal(rows, cols), group, torch.float32) for rows in (upper, lower)] for _ in "ab"]
    if is_mixed:
        whole[1][0] = DenseMatrix(whole[1][0].dequantised())  # type: ignore[call-overload]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expert_weights, "_PIECE_VALUES", piece_rows * cols)
        stacked = stack_experts(whole, CPU, torch.float32)
        dense = stack_dense(whole[0], CPU, torch.float32)
    assert torch.equal(dense, torch.cat([matrix.dequantised() for matrix in whole[0]]))
    assert (stacked.rows, stacked.cols) == (upper + lower, cols)
    if group == 8 or is_mixed:  # a matrix unit takes no such group, and a stack has one form
        assert stacked.group == 0
        wanted = [torch.cat([matrix.dequantised() for matrix in expert]) for expert in whole]
        assert torch.equal(stacked.data, torch.stack(wanted))
        return
    assert stacked.group == group
    for index, expert in enumerate(whole):
        parts = [repack_int4(matrix) for matrix in expert]
        assert torch.equal(stacked.data[index], torch.cat([words for words, _ in parts]))
        assert torch.equal(stacked.scale[index], torch.cat([scale for _, scale in parts], dim=1))


def test_a_defect_in_a_later_piece_is_named_by_its_place_in_the_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_weights, "_PIECE_VALUES", 10 * 64)
    config = write_random_checkpoint(tmp_path, RandomCheckpoint(quantization="none"))
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    with Checkpoint(tmp_path) as checkpoint:
        weight = checkpoint.tensor(name)
    weight[25, 7] = torch.inf
    edit_checkpoint(tmp_path, name, weight)
    place = re.escape("1 of 2048 values are NaN or infinite, the first at [25, 7]")
    with Checkpoint(tmp_path) as checkpoint, pytest.raises(CheckpointError, match=place) as refusal:
        WeightLoader(checkpoint, config, TritonKernels(CPU, torch.bfloat16)).load()
    assert refusal.value.tensor == name


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_rows_for_a_device_are_checked_in_the_host(device: str) -> None:
    """A meta tensor has no bytes that the processor could write, as one of a device."""
    take = copy_finite_into(torch.zeros(4, 3, dtype=torch.bfloat16, device=device))
    assert take(1, torch.ones(2, 3, dtype=torch.bfloat16))
    assert not take(3, torch.full((1, 3), torch.nan, dtype=torch.bfloat16))
