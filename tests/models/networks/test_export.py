"""Packing is exact, and an exported checkpoint loads as the network that training evaluated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from libs.text.tokenizer import Tokenizer
from models.bpe import write_tokenizer
from models.networks.architecture import Architecture
from models.networks.export import load_network, write_model
from models.networks.network import Network
from models.networks.quantize import dequantize, fake_quantize, group_scales, pack, quantize, unpack
from models.settings import quick_settings


@given(st.integers(1, 5), st.integers(1, 70), st.integers(0, 2**32 - 1))
def test_unpack_undoes_pack(rows: int, cols: int, seed: int) -> None:
    q = torch.randint(-8, 8, (rows, cols), generator=torch.Generator().manual_seed(seed), dtype=torch.int8)
    packed = pack(q)
    assert packed.dtype == torch.int32
    assert packed.shape == (rows, -(-cols // 8))
    assert torch.equal(unpack(packed, cols), q)


def test_nibbles_are_little_endian_with_offset_eight() -> None:
    q = torch.tensor([[-8, -7, 0, 7, 0, 0, 0, 7]], dtype=torch.int8)
    assert pack(q).view(torch.uint32).item() == 0xF888F810


def test_quantized_weights_are_nearest_and_groups_of_zeros_stay_zero() -> None:
    weight = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    weight[1, :32] = 0
    scale = group_scales(weight)
    back = dequantize(quantize(weight, scale), scale).float()
    step = scale.float().repeat_interleave(32, dim=-1)
    # Half a step, except where the range ends at +7 (absmax is 7.5 steps), plus bf16 rounding.
    assert bool(((back - weight).abs() <= 0.52 * step + 0.004 * weight.abs()).all())
    assert not back[1, :32].any()


def test_training_rounds_to_the_values_of_the_checkpoint() -> None:
    weight = torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    rounded = fake_quantize(weight)
    scale = group_scales(weight)
    torch.testing.assert_close(rounded, dequantize(quantize(weight, scale), scale).float(), atol=1e-6, rtol=0)
    rounded.sum().backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    assert bool((weight.grad == 1).all())


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Network, Path]:
    directory = tmp_path_factory.mktemp("model")
    write_tokenizer([bytes([b]) for b in range(256)], directory)
    torch.manual_seed(0)
    architecture: Architecture = quick_settings().base.architecture
    network = Network(architecture).eval()
    for moe in network.moe_layers():
        moe.gate.e_score_correction_bias.normal_(std=0.1)
    write_model(network, Tokenizer.from_dir(directory), directory)
    return network, directory


def test_reloaded_network_equals_the_quantized_one(exported: tuple[Network, Path]) -> None:
    network, directory = exported
    loaded = load_network(directory)
    assert loaded.a == network.a
    network.set_quantized(True)
    ids = torch.randint(0, 256, (1, 40), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        before, after = network.logits(network(ids).hidden), loaded.logits(loaded(ids).hidden)
    torch.testing.assert_close(after, before, atol=1e-4, rtol=1e-4)


def test_files_have_the_public_layout(exported: tuple[Network, Path]) -> None:
    network, directory = exported
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert len(files) >= 2
    total = 0
    for file in files:
        with safe_open(directory / file, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118 (safe_open is no mapping)
                assert index["weight_map"][name] == file
                tensor = shard.get_tensor(name)
                total += tensor.numel() * tensor.element_size()
    assert index["metadata"]["total_size"] == total
    a = network.a
    expert = "model.layers.1.mlp.experts.0"
    with safe_open(
        directory / index["weight_map"][f"{expert}.down_proj.weight_packed"], framework="pt"
    ) as shard:
        assert list(shard.get_tensor(f"{expert}.down_proj.weight_shape")) == [
            a.hidden_size,
            a.moe_intermediate_size,
        ]
        packed = shard.get_tensor(f"{expert}.down_proj.weight_packed")
        assert packed.shape == (a.hidden_size, a.moe_intermediate_size // 8)
    assert "model.layers.0.mlp.down_proj.weight" in index["weight_map"]
    config = json.loads((directory / "config.json").read_text())
    assert config["architectures"] == ["DeepseekV3ForCausalLM"]
    assert config["rope_scaling"]["type"] == "yarn"
    assert config["quantization_config"]["format"] == "pack-quantized"
