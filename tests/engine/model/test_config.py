"""The spellings of `config.json` in the releases, and refused configurations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from libs.engine.model_spec.config import load_config, parse_config
from slipstream.errors import InvalidArgument
from tests.support.random_checkpoint import TINY_CONFIG

YARN = {
    "factor": 64.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}
# The text model of Kimi-K2.5.
K25: dict[str, Any] = {
    "vocab_size": 163840,
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 384,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.827,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 262144,
    "rope_theta": 50000.0,
    "rope_scaling": {"type": "yarn", **YARN},
    "torch_dtype": "bfloat16",
}


def without(*keys: str) -> dict[str, Any]:
    return {key: value for key, value in K25.items() if key not in keys}


@pytest.mark.parametrize(
    "raw",
    [
        K25,
        {"model_type": "kimi_k25", "text_config": K25},
        without("rope_scaling") | {"rope_scaling": {"rope_type": "yarn", **YARN}},
        without("rope_scaling", "rope_theta")
        | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 50000.0, **YARN}},
        without("torch_dtype") | {"dtype": "bfloat16"},
        {"text_config": without("torch_dtype"), "torch_dtype": "torch.bfloat16"},
    ],
)
def test_all_spellings_give_the_same_config(raw: dict[str, Any]) -> None:
    assert parse_config(raw) == parse_config(K25)


def test_kimi_k25_constants() -> None:
    config = parse_config(K25)
    assert config.latent_width == 576
    assert config.qk_head_dim == 192
    assert config.softmax_scale == pytest.approx(0.144680, abs=1e-6)
    assert [config.is_moe(layer) for layer in (0, 1, 60)] == [False, True, True]
    assert config.quantization is None


def test_no_rope_scaling_is_plain_rope() -> None:
    config = parse_config(without("rope_scaling"))
    assert config.yarn is None
    assert config.softmax_scale == pytest.approx(192**-0.5)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"routed_scaling_factor": float("nan")}, "routed_scaling_factor"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim"),
        ({"rope_scaling": {"type": "longrope"}}, "rope_scaling.type"),
        ({"rope_interleave": False}, "rope_interleave"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"n_group": 5}, "n_group"),
        ({"topk_group": 2}, "topk_group"),
        ({"n_group": 96, "topk_group": 1}, "num_experts_per_tok"),
    ],
)
def test_unusable_configs_name_the_key(change: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_config(K25 | change)
    assert caught.value.field == field


def test_unreadable_config_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="cannot read"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(InvalidArgument, match="not JSON"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("[]", encoding="utf-8")
    with pytest.raises(InvalidArgument, match="not a JSON object"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(TINY_CONFIG), encoding="utf-8")
    assert load_config(tmp_path).hidden_size == TINY_CONFIG["hidden_size"]
