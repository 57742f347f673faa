"""A checkpoint in DeepSeek-V3's layout as a GGUF file for llama.cpp: the same weights in bf16, no tokenizer.

Shards are read without torch: a safetensors file is 8 bytes of header length, a JSON header, and raw tensors.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

_PLAIN = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}
_WIDE = ("norm", "gate_inp.", "exp_probs_b")  # kept in float32


class Bf16Shards:
    """All tensors of a checkpoint. Raises ValueError for those that are neither bf16 nor float32."""

    def __init__(self, model_dir: Path) -> None:
        self._where: dict[str, tuple[Path, int, dict[str, Any]]] = {}
        for path in sorted(model_dir.glob("*.safetensors")):
            with path.open("rb") as file:
                n_bytes = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(n_bytes))
            header.pop("__metadata__", None)
            self._where |= {name: (path, 8 + n_bytes, entry) for name, entry in header.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def read(self, name: str) -> np.ndarray:
        """The tensor as float32."""
        path, base, entry = self._where[name]
        kinds = {"BF16": np.uint16, "F32": np.float32}
        if entry["dtype"] not in kinds:
            raise ValueError(f"{name} is {entry['dtype']}: llama.cpp is measured on bf16 checkpoints")
        begin, end = entry["data_offsets"]
        kind = np.dtype(kinds[entry["dtype"]])
        raw = np.fromfile(path, kind, (end - begin) // kind.itemsize, offset=base + begin)
        shaped = raw.reshape(entry["shape"])
        return shaped if kind == np.float32 else (shaped.astype(np.uint32) << 16).view(np.float32)


def write_gguf(model_dir: Path, target: Path) -> None:
    """Write the whole model. Raises ValueError for one with rope scaling, which it does not convert."""
    import gguf

    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    if config.get("rope_scaling"):
        raise ValueError("llama.cpp is measured on checkpoints without rope scaling")
    writer: Any = gguf.GGUFWriter(target, "deepseek2")
    _add_settings(writer, gguf, config)
    shards = Bf16Shards(model_dir)

    def add(name: str, tensor: np.ndarray) -> None:
        kind = gguf.GGMLQuantizationType.BF16
        if tensor.ndim == 1 or any(part in name for part in _WIDE):
            writer.add_tensor(name, np.ascontiguousarray(tensor, np.float32))
        else:
            writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(tensor), kind), raw_dtype=kind)

    add("token_embd.weight", shards.read("model.embed_tokens.weight"))
    add("output_norm.weight", shards.read("model.norm.weight"))
    add("output.weight", shards.read("lm_head.weight"))
    for layer in range(config["num_hidden_layers"]):
        _add_layer(add, shards, config, layer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_settings(writer: Any, gguf: Any, config: dict[str, Any]) -> None:
    rank, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(1)  # one latent for all heads
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(rank)
    writer.add_key_length(rank + rope)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rope)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_rope_dimension_count(rope)
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_tokenizer_model("none")


def _add_layer(add: Any, shards: Bf16Shards, config: dict[str, Any], layer: int) -> None:
    source, target = f"model.layers.{layer}", f"blk.{layer}"
    for theirs, ours in _PLAIN.items():
        if f"{source}.{theirs}.weight" in shards:
            add(f"{target}.{ours}.weight", shards.read(f"{source}.{theirs}.weight"))
    # Keys are absorbed into queries, so that llama.cpp takes their half of kv_b transposed.
    heads, nope = config["num_attention_heads"], config["qk_nope_head_dim"]
    both = shards.read(f"{source}.self_attn.kv_b_proj.weight")
    both = both.reshape(heads, nope + config["v_head_dim"], config["kv_lora_rank"])
    add(f"{target}.attn_k_b.weight", both[:, :nope].transpose(0, 2, 1))
    add(f"{target}.attn_v_b.weight", both[:, nope:])
    bias = f"{source}.mlp.gate.e_score_correction_bias"
    if bias not in shards:
        return
    add(f"{target}.exp_probs_b.bias", shards.read(bias))
    for part in ("gate", "up", "down"):
        experts = [
            shards.read(f"{source}.mlp.experts.{expert}.{part}_proj.weight")
            for expert in range(config["n_routed_experts"])
        ]
        add(f"{target}.ffn_{part}_exps.weight", np.stack(experts))
