"""FP8 checkpoints in blocks: values, ragged edges, and logits against a dense fp32 copy of the checkpoint."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from bench.engine.transformers_peer import load_transformers
from libs.engine.model.checkpoint import Checkpoint
from libs.engine.model.runner import ModelRunner, RunnerOptions
from libs.engine.model.shards import CheckpointError
from libs.engine.model_spec.matrix import Fp8Matrix
from libs.engine.model_spec.quantization import Fp8Blocks
from libs.engine.model_spec.stored_matrix import StoredMatrix
from tests.engine.model.test_checkpoint import edit_checkpoint
from tests.engine.model.test_parity import batch_of, pages_for
from tests.support.quantize import pack_fp8
from tests.support.random_checkpoint import TINY_CONFIG, RandomCheckpoint, write_random_checkpoint

# More than one block of 128 in both directions, the last one ragged.
WIDE_CONFIG = TINY_CONFIG | {"hidden_size": 192, "intermediate_size": 160, "num_hidden_layers": 2}
SPECS = {
    "ragged": RandomCheckpoint(quantization="fp8", fp8_block=(24, 40)),
    "128x128": RandomCheckpoint(quantization="fp8", config=WIDE_CONFIG),
    "k25_prefix": RandomCheckpoint(quantization="fp8", fp8_block=(40, 24), prefix="language_model."),
    "fp32_elsewhere": RandomCheckpoint(quantization="fp8", fp8_block=(16, 16), dtype="float32"),
    "no_q_lora": RandomCheckpoint(
        quantization="fp8", fp8_block=(24, 24), config=TINY_CONFIG | {"q_lora_rank": None}
    ),
}
NAME = "model.layers.1.self_attn.kv_a_proj_with_mqa"


def decode_e4m3(byte: int) -> float:
    """One value by the definition of the format (OCP 8-bit floating point, 2023)."""
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = byte >> 3 & 0xF, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


DECODED = np.array([decode_e4m3(byte) for byte in range(256)], np.float32)


def decode(weight: torch.Tensor, scale_inv: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Each element by itself times the factor at its block's place."""
    values = DECODED[weight.view(torch.uint8).numpy().astype(np.int64)]
    rows, cols = np.indices(values.shape)
    factors = scale_inv.float().numpy()[rows // block[0], cols // block[1]]
    return torch.from_numpy(values * factors)


def write_dense_copy(model_dir: Path, target: Path, block: tuple[int, int], *, bf16: bool) -> None:
    """The same model in dense tensors, which this file's own decoder makes."""
    target.mkdir()
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(model_dir.glob("*.safetensors")):
        tensors |= load_file(path)
    for name in [name for name in tensors if name.endswith(".weight_scale_inv")]:
        weight = name.removesuffix("_scale_inv")
        dense = decode(tensors[weight], tensors.pop(name), block)
        tensors[weight] = dense.bfloat16().float() if bf16 else dense
    save_file(tensors, target / "model.safetensors")
    config = json.loads((model_dir / "config.json").read_text())
    (config.get("text_config") or config).pop("quantization_config")
    (target / "config.json").write_text(json.dumps(config))


def written(folder: Path, matrix: Fp8Matrix) -> Path:
    """A checkpoint with this matrix alone, as `w`."""
    tensors = {"w.weight": matrix.weight, "w.weight_scale_inv": matrix.scale_inv}
    save_file(tensors, folder / "model.safetensors")
    return folder


def widened(folder: Path, matrix: Fp8Matrix, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    rows, cols = matrix.weight.shape
    with Checkpoint(written(folder, matrix)) as checkpoint:
        return checkpoint.matrix("w", rows, cols, matrix.block, lambda _: dtype).dequantised()


def test_every_value_of_the_format_is_read(tmp_path: Path) -> None:
    finite = torch.tensor([byte for byte in range(256) if byte & 0x7F != 0x7F], dtype=torch.uint8)
    matrix = Fp8Matrix(finite.view(torch.float8_e4m3fn)[None], torch.ones(1, 16), Fp8Blocks(16, 16))
    assert np.array_equal(widened(tmp_path, matrix)[0].numpy(), DECODED[finite.numpy()])


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_a_value_that_is_no_number_is_refused(tmp_path: Path, byte: int) -> None:
    values = torch.full((40, 40), 0x7E, dtype=torch.uint8)
    values[39, 38] = byte
    matrix = Fp8Matrix(values.view(torch.float8_e4m3fn), torch.ones(2, 2), Fp8Blocks(24, 24))
    with pytest.raises(CheckpointError, match=r"1 of 1600 .* the first at \[39, 38\]"):
        widened(tmp_path, matrix)


def test_a_value_that_bf16_does_not_hold_is_refused(tmp_path: Path) -> None:
    values = torch.full((16, 16), 448.0).to(torch.float8_e4m3fn)
    matrix = Fp8Matrix(values, torch.full((1, 1), 3.4e38 / 448), Fp8Blocks(16, 16))
    with pytest.raises(CheckpointError, match="does not hold"):
        widened(tmp_path, matrix, torch.bfloat16)
    assert bool(torch.isfinite(widened(tmp_path, matrix)).all())


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pieces_and_cuts_have_the_factors_of_their_places(tmp_path: Path, dtype: torch.dtype) -> None:
    weight = torch.randn(200, 90, generator=torch.Generator().manual_seed(1))
    matrix = pack_fp8(weight, Fp8Blocks(24, 40))
    wanted = decode(matrix.weight, matrix.scale_inv, (24, 40)).to(dtype)
    with Checkpoint(written(tmp_path, matrix)) as checkpoint:
        whole = checkpoint.matrix("w", 200, 90, matrix.block, lambda _: dtype)
        assert isinstance(whole, StoredMatrix) and whole.values.dtype == dtype
        cut = whole.cut_rows(slice(50, 171)).cut_cols(slice(30, 83))
        seen = torch.zeros(121, 53, dtype=dtype)

        def sink(first: int, rows: torch.Tensor) -> bool:
            seen[first : first + len(rows)] += rows
            return True

        cut.values.stream(sink, 4)
        checkpoint.finish()
        assert torch.equal(seen, wanted[50:171, 30:83])
        assert torch.equal(cut.values.read(), seen) and torch.equal(whole.values.read(), wanted)


@given(st.integers(1, 50), st.integers(1, 50), st.integers(1, 60), st.integers(1, 60), st.integers(0, 2**31))
def test_blocks_are_ragged_at_both_edges(
    tmp_path_factory: pytest.TempPathFactory,
    rows: int,
    cols: int,
    block_rows: int,
    block_cols: int,
    seed: int,
) -> None:
    weight = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))
    block = Fp8Blocks(block_rows, block_cols)
    packed = pack_fp8(weight, block)
    assert packed.scale_inv.shape == (-(-rows // block_rows), -(-cols // block_cols))
    actual = widened(tmp_path_factory.mktemp("fp8"), packed)
    assert torch.equal(actual, decode(packed.weight, packed.scale_inv, (block_rows, block_cols)))
    largest = float(weight.abs().max())
    assert torch.all((actual - weight).abs() <= weight.abs() * 2**-4 + largest * 2**-10)


@pytest.mark.parametrize("kernels", ["torch", "native"])
@pytest.mark.parametrize("weight_dtype", ["float32", "auto"])
@pytest.mark.parametrize("name", SPECS)
def test_logits_equal_those_of_the_dequantised_model(
    tmp_path: Path, name: str, weight_dtype: Any, kernels: Any
) -> None:
    spec = SPECS[name]
    config = write_random_checkpoint(tmp_path / "fp8", spec)
    bf16 = weight_dtype == "auto" and spec.dtype == "bfloat16"
    write_dense_copy(tmp_path / "fp8", tmp_path / "dense", spec.fp8_block, bf16=bf16)
    options = RunnerOptions(
        n_pages=64,
        block_tokens=16,
        weight_dtype=weight_dtype,
        kv_dtype="float32",
        kernels=kernels,
        compute_dtype="float32",
    )
    runner = ModelRunner.load(tmp_path / "fp8", options)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, 200).astype(np.int32)
    actual = runner.forward(batch_of([(ids, 0, pages_for(200))])).logits
    with torch.inference_mode():
        wanted = load_transformers(tmp_path / "dense", torch.float32)(torch.from_numpy(ids)[None].long())
    torch.testing.assert_close(actual, wanted.logits[0], rtol=0, atol=1e-4)


@pytest.fixture
def fp8_dir(tmp_path: Path) -> Path:
    config = TINY_CONFIG | {"num_hidden_layers": 2}
    write_random_checkpoint(tmp_path, RandomCheckpoint(config, quantization="fp8", fp8_block=(24, 40)))
    return tmp_path


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e8m0fnu])
def test_scales_of_other_types_are_read(fp8_dir: Path, dtype: torch.dtype) -> None:
    powers = torch.tensor([[2.0**-9, 2.0**-6], [2.0**-8, 2.0**-7]])
    edit_checkpoint(fp8_dir, f"{NAME}.weight_scale_inv", powers.to(dtype))
    with Checkpoint(fp8_dir) as checkpoint:
        values = checkpoint.matrix(NAME, 40, 64, Fp8Blocks(24, 40)).dequantised()
        stored = checkpoint.tensor(f"{NAME}.weight")
    assert torch.equal(values, decode(stored, powers, (24, 40)))
    ModelRunner.load(fp8_dir, RunnerOptions(n_pages=2, kernels="torch"))


NAN = torch.full((40, 64), 0, dtype=torch.uint8).index_fill_(0, torch.tensor([3]), 0xFF)


@pytest.mark.parametrize(
    ("part", "tensor", "reason"),
    [
        ("weight_scale_inv", None, "not in the checkpoint"),
        ("weight_scale_inv", torch.ones(1, 1), r"expected shape \[2, 2\]"),
        ("weight_scale_inv", torch.ones(2, 2).int(), "expected dtype F32 or BF16 or F16 or F8_E8M0"),
        ("weight_scale_inv", torch.tensor([[1.0, math.nan], [1, 1]]), r"1 of 4 .* the first at \[0, 1\]"),
        ("weight_scale_inv", torch.full((2, 2), 1e38), "makes weights infinite"),
        ("weight_scale_inv", torch.tensor([[1.0, -1.0], [1, 1]]), "below 0"),
        ("weight", NAN.view(torch.float8_e4m3fn), r"64 of 2560 .* the first at \[3, 0\]"),
        ("weight", torch.ones(40, 64).to(torch.float8_e5m2), "expected dtype .*F8_E4M3, got F8_E5M2"),
        ("weight", torch.ones(40, 64).to(torch.int8), "expected dtype .*F8_E4M3, got I8"),
        ("input_scale", torch.ones(1), "static scales of activations"),
    ],
)
def test_damaged_and_other_fp8_tensors_are_refused_by_name(
    fp8_dir: Path, part: str, tensor: torch.Tensor | None, reason: str
) -> None:
    edit_checkpoint(fp8_dir, f"{NAME}.{part}", tensor)
    with pytest.raises(CheckpointError, match=reason) as caught:
        ModelRunner.load(fp8_dir, RunnerOptions(n_pages=2, kernels="torch"))
    assert caught.value.tensor == f"{NAME}.{part}"


def test_scales_of_a_dense_weight_are_refused(fp8_dir: Path) -> None:
    edit_checkpoint(fp8_dir, f"{NAME}.weight", torch.ones(40, 64))
    with pytest.raises(CheckpointError, match="unexpected"):
        ModelRunner.load(fp8_dir, RunnerOptions(n_pages=2, kernels="torch"))


def test_fp8_weights_without_stated_blocks_are_refused(fp8_dir: Path) -> None:
    config = json.loads((fp8_dir / "config.json").read_text())
    del config["quantization_config"]
    (fp8_dir / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="quantization_config states no FP8 blocks"):
        ModelRunner.load(fp8_dir, RunnerOptions(n_pages=2, kernels="torch"))
