"""Every key of config.json is used, without effect, or refused by name."""

from __future__ import annotations

import copy
import json
import runpy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.engine.eagle.config import parse_head_config
from libs.engine.model_spec import known_keys
from libs.engine.model_spec.config import load_config, parse_config
from libs.engine.model_spec.config_section import KeyTable
from libs.engine.model_spec.quantization import Fp8Blocks, Int4Groups
from slipstream.errors import InvalidArgument
from tests.engine.model.release_configs import (
    DEEPSEEK_V3,
    FP8,
    INT4,
    KIMI_EAGLE3_HEAD,
    KIMI_K2_THINKING,
    KIMI_K25,
    TEXT_RELEASES,
)

ROOT = Path(__file__).resolve().parents[3]
Way = tuple[str, ...]
WEIGHTS = ("quantization_config", "config_groups", "group_0", "weights")
QUANT, GROUP = WEIGHTS[0], ".".join(WEIGHTS[:3])
NEW_INT4: dict[str, Any] = {
    "version": "0.18.0",
    "sparsity_config": {},
    "transform_config": {},
    "global_compression_ratio": None,
}

# Each section of a release: the release, the way to the section, its table.
SECTIONS: dict[str, tuple[dict[str, Any], Way, KeyTable]] = {
    "text": (DEEPSEEK_V3, (), known_keys.TEXT_KEYS),
    "nested text": (KIMI_K25, ("text_config",), known_keys.TEXT_KEYS),
    "top": (KIMI_K25, (), known_keys.MULTIMODAL_KEYS),
    "yarn": (DEEPSEEK_V3, ("rope_scaling",), known_keys.YARN_KEYS),
    "fp8": (DEEPSEEK_V3, ("quantization_config",), known_keys.FP8_KEYS),
    "int4": (KIMI_K2_THINKING, ("quantization_config",), known_keys.COMPRESSED_TENSORS_KEYS),
    "group": (KIMI_K2_THINKING, WEIGHTS[:3], known_keys.GROUP_KEYS),
    "int4 weights": (KIMI_K2_THINKING, WEIGHTS, known_keys.INT4_KEYS),
    "head": (KIMI_EAGLE3_HEAD, (), known_keys.HEAD_KEYS),
    "head flags": (KIMI_EAGLE3_HEAD, ("eagle_config",), known_keys.HEAD_FLAG_KEYS),
}


def edited(raw: dict[str, Any], way: Way, change: dict[str, Any]) -> dict[str, Any]:
    """A copy with keys changed in one section; Ellipsis removes a key."""
    result = copy.deepcopy(raw)
    section = result
    for name in way:
        section = section[name]
    section.update(change)
    for key in [key for key, value in change.items() if value is ...]:
        del section[key]
    return result


def parse(raw: dict[str, Any]) -> Any:
    return parse_head_config(raw) if "draft_vocab_size" in raw else parse_config(raw)


@pytest.mark.parametrize("name", TEXT_RELEASES)
def test_the_config_of_each_release_loads(name: str) -> None:
    config = parse_config(TEXT_RELEASES[name])
    quantized = Fp8Blocks(128, 128) if name in ("deepseek-v3", "deepseek-v3.1", "kimi-k2-instruct") else None
    assert config.quantization == (None if name == "moonlight" else quantized or Int4Groups(32))
    assert config.dtype == "bfloat16"


def test_what_transformers_writes_for_this_architecture_loads() -> None:
    # Loaded where it is used: each process that collects the tests would load it, for seconds.
    from transformers import DeepseekV3Config

    stated = {
        key: value for key, value in DEEPSEEK_V3.items() if key not in ("quantization_config", "auto_map")
    }
    written = json.loads(DeepseekV3Config(**copy.deepcopy(stated)).to_json_string(use_diff=False))
    original = parse_config(stated)
    assert parse_config(written) == original


def test_a_public_draft_head_loads() -> None:
    assert parse_head_config(KIMI_EAGLE3_HEAD).draft_vocab_size == 32000


def test_newer_compressed_tensors_load() -> None:
    raw = edited(KIMI_K2_THINKING, ("quantization_config",), NEW_INT4)
    raw = edited(raw, WEIGHTS, {"scale_dtype": None, "zp_dtype": "torch.int8", "group_size": 64})
    raw = edited(raw, WEIGHTS[:3], {"format": "pack-quantized"})
    assert parse_config(raw).quantization == Int4Groups(64)


@given(
    st.sampled_from(sorted(SECTIONS)),
    st.text(st.characters(codec="ascii", categories=("Ll", "Nd"), include_characters="_"), min_size=1),
    st.one_of(st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.just({}), st.just([])),
)
def test_an_unknown_key_is_refused_by_name(section: str, key: str, value: Any) -> None:
    raw, way, table = SECTIONS[section]
    if key in table.used or key in table.without_effect or key in table.fixed or key == "text_config":
        return
    with pytest.raises(InvalidArgument, match="unknown key with the value") as caught:
        parse(edited(raw, way, {key: value}))
    assert caught.value.field == ".".join((*way, key))


@pytest.mark.parametrize("section", SECTIONS)
def test_keys_without_effect_have_none(section: str) -> None:
    raw, way, table = SECTIONS[section]
    expected = parse(raw)
    assert not set(table.without_effect) & (table.used | set(table.fixed))
    for key in table.without_effect:
        assert parse(edited(raw, way, {key: "anything"})) == expected, key


@pytest.mark.parametrize("section", SECTIONS)
def test_fixed_keys_take_their_supported_values_only(section: str) -> None:
    raw, way, table = SECTIONS[section]
    expected = parse(raw)
    for key, (supported, _) in table.fixed.items():
        for value in supported:
            if key not in ("architectures", "quant_method"):
                assert parse(edited(raw, way, {key: value})) == expected, key
        with pytest.raises(InvalidArgument, match="is not supported") as caught:
            parse(edited(raw, way, {key: "another value"}))
        assert caught.value.field == ".".join((*way, key))
        assert "'another value'" in caught.value.message
        assert all(repr(value) in caught.value.message for value in supported)


@pytest.mark.parametrize(
    ("raw", "way", "change", "field"),
    [
        (DEEPSEEK_V3, (), {"topk_method": "greedy"}, "topk_method"),
        (DEEPSEEK_V3, (), {"num_key_value_heads": 8}, "num_key_value_heads"),
        (DEEPSEEK_V3, (), {"head_dim": 128}, "head_dim"),
        (DEEPSEEK_V3, (), {"qk_head_dim": 128}, "qk_head_dim"),
        (DEEPSEEK_V3, (), {"model_type": "deepseek_v2"}, "model_type"),
        (DEEPSEEK_V3, (), {"architectures": ["DeepseekV32ForCausalLM"]}, "architectures"),
        (DEEPSEEK_V3, (), {"index_topk": 2048}, "index_topk"),
        (DEEPSEEK_V3, (), {"temperature": 0.6}, "temperature"),
        (DEEPSEEK_V3, (), {"dtype": "float32"}, "torch_dtype"),
        (DEEPSEEK_V3, (), {"torch_dtype": "float8_e4m3fn"}, "torch_dtype"),
        (DEEPSEEK_V3, (), {"norm_topk_prob": "false"}, "norm_topk_prob"),
        (DEEPSEEK_V3, (), {"num_mtp_layers": 2}, "num_mtp_layers"),
        (DEEPSEEK_V3, (), {"rms_norm_eps": 0}, "rms_norm_eps"),
        (DEEPSEEK_V3, (), {"vocab_size": 2**31}, "vocab_size"),
        (DEEPSEEK_V3, (), {"rope_parameters": {"rope_type": "default"}}, "rope_scaling"),
        (DEEPSEEK_V3, (), {"rope_theta": 1}, "rope_theta"),
        (KIMI_K25, (), {"hidden_size": 7168}, "hidden_size"),
        (KIMI_K25, (), {"text_config": {}}, "text_config.vocab_size"),
        (KIMI_K25, (), {"text_config": []}, "text_config"),
        (KIMI_K25, (), {"quantization_config": FP8}, "text_config.quantization_config"),
        (KIMI_K25, ("text_config",), {"topk_method": "greedy"}, "text_config.topk_method"),
        (DEEPSEEK_V3, (), {"quantization_config": {"quant_method": "gptq"}}, f"{QUANT}.quant_method"),
        (DEEPSEEK_V3, (), {"quantization_config": {}}, "quantization_config.quant_method"),
        (DEEPSEEK_V3, (), {"quantization_config": "fp8"}, "quantization_config"),
        (KIMI_K2_THINKING, WEIGHTS, {"symmetric": False}, ".".join((*WEIGHTS, "symmetric"))),
        (KIMI_K2_THINKING, WEIGHTS, {"num_bits": 8}, ".".join((*WEIGHTS, "num_bits"))),
        (KIMI_K2_THINKING, WEIGHTS, {"num_bits": ...}, ".".join((*WEIGHTS, "num_bits"))),
        (KIMI_K2_THINKING, WEIGHTS, {"type": "float"}, ".".join((*WEIGHTS, "type"))),
        (KIMI_K2_THINKING, WEIGHTS, {"actorder": "group"}, ".".join((*WEIGHTS, "actorder"))),
        (KIMI_K2_THINKING, WEIGHTS, {"actorder": True}, ".".join((*WEIGHTS, "actorder"))),
        (KIMI_K2_THINKING, WEIGHTS, {"strategy": "channel"}, ".".join((*WEIGHTS, "strategy"))),
        (KIMI_K2_THINKING, WEIGHTS, {"group_size": -1}, ".".join((*WEIGHTS, "group_size"))),
        (KIMI_K2_THINKING, WEIGHTS[:3], {"weights": None}, ".".join(WEIGHTS)),
        (KIMI_K2_THINKING, WEIGHTS[:3], {"output_activations": {}}, f"{GROUP}.output_activations"),
        (KIMI_K2_THINKING, WEIGHTS[:2], {"group_0": ...}, "quantization_config.config_groups"),
        (KIMI_K2_THINKING, WEIGHTS[:1], {"format": "int-quantized"}, "quantization_config.format"),
        (KIMI_K2_THINKING, WEIGHTS[:1], {"kv_cache_scheme": {"num_bits": 8}}, f"{QUANT}.kv_cache_scheme"),
        (DEEPSEEK_V3, WEIGHTS[:1], {"fmt": "e5m2"}, "quantization_config.fmt"),
        (DEEPSEEK_V3, WEIGHTS[:1], {"activation_scheme": "static"}, "quantization_config.activation_scheme"),
        (DEEPSEEK_V3, WEIGHTS[:1], {"weight_block_size": None}, "quantization_config.weight_block_size"),
        (DEEPSEEK_V3, WEIGHTS[:1], {"weight_block_size": [128, 0]}, "quantization_config.weight_block_size"),
        (KIMI_EAGLE3_HEAD, (), {"rms_norm_eps": "x"}, "rms_norm_eps"),
        (KIMI_EAGLE3_HEAD, (), {"norm_output": 1}, "norm_output"),
        (KIMI_EAGLE3_HEAD, (), {"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling.rope_type"),
        (KIMI_EAGLE3_HEAD, ("eagle_config",), {"use_mtp_layernorm": True}, "eagle_config.use_mtp_layernorm"),
        (KIMI_EAGLE3_HEAD, ("eagle_config",), {"target_hidden_size": 64}, "eagle_config.target_hidden_size"),
    ],
)  # fmt: skip
def test_unsupported_values_are_refused_by_name(
    raw: dict[str, Any], way: Way, change: dict[str, Any], field: str
) -> None:
    parse(raw)
    with pytest.raises(InvalidArgument) as caught:
        parse(edited(raw, way, change))
    assert caught.value.field == field


def test_groups_of_different_sizes_are_refused() -> None:
    other = copy.deepcopy(INT4["config_groups"]["group_0"])
    other["weights"]["group_size"] = 64
    with pytest.raises(InvalidArgument, match="64 differs from 32 of another group") as caught:
        parse(edited(KIMI_K2_THINKING, WEIGHTS[:2], {"group_1": other}))
    assert caught.value.field == "quantization_config.config_groups.group_1.weights.group_size"


def test_the_page_has_the_tables() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "gen_checkpoint_keys.py"))
    page = (ROOT / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    assert page == script["render"](page), "python scripts/gen_checkpoint_keys.py"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"rope_theta": 1, "rope_theta": 2}', "'rope_theta' is stated twice"),
        ('{"routed_scaling_factor": NaN}', "NaN is no number"),
        ('{"a":' * 100_000, "not JSON"),
        (" " * (4 << 20) + "{}", "more than 4194304 bytes"),
        ("\xff", "not JSON"),
    ],
)
def test_config_files_that_are_no_plain_json_are_refused(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(InvalidArgument, match=reason) as caught:
        load_config(tmp_path)
    assert caught.value.field == str(tmp_path / "config.json")
