"""The known keys of config.json by section. docs/checkpoints.md prints those with fixed values.

The keys are those of the releases (DeepSeek-V3 and R1, Moonlight, Kimi-K2, Kimi-K2.5) and those that
transformers and compressed-tensors write.
"""

from __future__ import annotations

from typing import Any

from libs.engine.model_spec.config_section import KeyTable

_TRAINING = "only training uses it"
_RECORD = "it records where the file comes from"
_OUTPUT = "it shapes what transformers returns, not the values"
_VISION = "only text is served"
_TASK = "other tasks than text generation use it"
_RUNTIME = "it arranges memory or processes, not the values"
_TOKENS = "the router finds the special tokens by their names in the tokenizer"
_STORED = "the stored tensors themselves show what is quantised"
_STORED_HEAD = "the stored tensors show whether the head has one"
_CALIBRATION = "only calibration uses it"


def _names(keys: str) -> frozenset[str]:
    return frozenset(keys.split())


def _why(reason: str, keys: str) -> dict[str, str]:
    return dict.fromkeys(keys.split(), reason)


# What transformers writes into every config.json.
_COMMON = {
    **_why(
        _RECORD,
        "_name_or_path _commit_hash auto_map transformers_version unsloth_fixed tokenizer_class",
    ),
    **_why(_TOKENS, "bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id prefix"),
    **_why(
        _OUTPUT,
        "output_attentions output_hidden_states output_router_logits return_dict return_dict_in_generate",
    ),
    **_why(_OUTPUT, "output_scores tie_last_hidden_states"),
    **_why(
        _TASK, "finetuning_task id2label label2id num_labels problem_type task_specific_params is_decoder"
    ),
    **_why(
        _RUNTIME,
        "torchscript tf_legacy_loss use_bfloat16 use_cache chunk_size_feed_forward _attn_implementation "
        "_attn_implementation_autoset attn_implementation ep_size pretraining_tp",
    ),
    **_why(
        _TRAINING,
        "attention_dropout initializer_range aux_loss_alpha seq_aux router_aux_loss_coef hidden_dropout",
    ),
}

# Sampling defaults that old versions of transformers write: at these values they do nothing.
_GENERATION = (
    "generation_config.json states sampling defaults",
    {
        "max_length": 20,
        "min_length": 0,
        "do_sample": False,
        "early_stopping": False,
        "num_beams": 1,
        "num_beam_groups": 1,
        "diversity_penalty": 0.0,
        "temperature": 1.0,
        "top_k": 50,
        "top_p": 1.0,
        "typical_p": 1.0,
        "repetition_penalty": 1.0,
        "length_penalty": 1.0,
        "no_repeat_ngram_size": 0,
        "encoder_no_repeat_ngram_size": 0,
        "num_return_sequences": 1,
        "remove_invalid_values": False,
    },
)

_COMMON_FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
    **{key: ((value,), _GENERATION[0]) for key, value in _GENERATION[1].items()},
    "is_encoder_decoder": ((False,), "the model is a decoder"),
    "add_cross_attention": ((False,), "the model is a decoder"),
    "tie_encoder_decoder": ((False,), "the model is a decoder"),
    "pruned_heads": (({},), "all heads are computed"),
}

# The top level of Kimi-K2.5, around `text_config`.
MULTIMODAL_KEYS = KeyTable(
    used=frozenset({"text_config", "quantization_config", "dtype", "torch_dtype", "tie_word_embeddings"}),
    without_effect={
        **_COMMON,
        **_why(
            _VISION,
            "vision_config ignore_index media_placeholder_token_id use_unified_vision_chunk "
            "video_placeholder image_token_id video_token_id vision_start_token_id vision_end_token_id "
            "projection_hidden_size projection_layer_norm_eps",
        ),
    },
    fixed={
        **_COMMON_FIXED,
        "architectures": ((["KimiK25ForConditionalGeneration"],), "the engine runs this architecture"),
        "model_type": (("kimi_k25",), "the engine runs this type"),
    },
)

TEXT_KEYS = KeyTable(
    used=_names(
        "vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads q_lora_rank "
        "kv_lora_rank qk_nope_head_dim qk_rope_head_dim qk_head_dim head_dim v_head_dim intermediate_size "
        "moe_intermediate_size n_routed_experts num_experts_per_tok n_shared_experts first_k_dense_replace "
        "moe_layer_freq n_group topk_group norm_topk_prob routed_scaling_factor rms_norm_eps rope_theta "
        "rope_scaling rope_parameters max_position_embeddings tie_word_embeddings dtype torch_dtype "
        "quantization_config num_nextn_predict_layers num_mtp_layers"
    ),
    without_effect=_COMMON,
    fixed={
        **_COMMON_FIXED,
        "architectures": ((["DeepseekV3ForCausalLM"],), "the engine runs this architecture"),
        "model_type": (("kimi_k2", "deepseek_v3"), "the engine runs these types"),
        "hidden_act": (("silu",), "the MLPs are gated by silu"),
        "scoring_func": (("sigmoid",), "experts are scored by the sigmoid"),
        "topk_method": (("noaux_tc",), "experts are chosen by group and correction bias"),
        "attention_bias": ((False,), "the projections have no bias"),
        "mlp_bias": ((False,), "the projections have no bias"),
        "rope_interleave": ((True,), "rotary pairs are interleaved"),
        "partial_rotary_factor": ((1.0,), "all of qk_rope_head_dim is rotated"),
    },
)

_ROPE_FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
    "partial_rotary_factor": ((1.0,), "all of qk_rope_head_dim is rotated")
}
PLAIN_ROPE_KEYS = KeyTable(frozenset({"type", "rope_type", "rope_theta"}), fixed=_ROPE_FIXED)
YARN_KEYS = KeyTable(
    PLAIN_ROPE_KEYS.used
    | {
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "attention_factor",
        "truncate",
    },
    fixed=_ROPE_FIXED,
)

# An EAGLE-3 head; `eagle_config` may nest the second table, whose keys may also be at the top.
HEAD_FLAG_KEYS = KeyTable(
    used=_names(
        "norm_before_residual norm_output fc_norm norm_before_fc eagle_aux_hidden_state_layer_ids "
        "target_hidden_size"
    ),
    without_effect=_why(_STORED_HEAD, "has_lm_head"),
    fixed={
        "use_aux_hidden_state": ((True,), "an EAGLE-3 head reads features of three layers"),
        "num_aux_hidden_states": ((3,), "an EAGLE-3 head reads features of three layers"),
        "use_input_layernorm_in_first_layer": ((True,), "the token's embedding is normed"),
        "use_last_layernorm": ((True,), "the output is normed before the head"),
        "use_mtp_layernorm": ((False,), "this variant of the head is not run"),
        "parallel_draft_step": ((1,), "one token is drafted at a time"),
    },
)
HEAD_KEYS = KeyTable(
    used=HEAD_FLAG_KEYS.used
    | _names(
        "architectures vocab_size draft_vocab_size hidden_size intermediate_size num_attention_heads "
        "num_key_value_heads head_dim rms_norm_eps rope_theta rope_scaling rope_parameters eagle_config"
    ),
    without_effect={
        **_COMMON,
        **HEAD_FLAG_KEYS.without_effect,
        **_why("the stored tensors show their type", "dtype torch_dtype"),
        **_why(_RECORD, "target_model_type"),
        **_why("use_sliding_window switches them on", "sliding_window max_window_layers"),
        **_why("a draft reads a window of the context", "max_position_embeddings"),
    },
    fixed={
        **_COMMON_FIXED,
        **HEAD_FLAG_KEYS.fixed,
        "model_type": (("llama",), "a head is one layer of this type"),
        "hidden_act": (("silu",), "the MLP is gated by silu"),
        "num_hidden_layers": ((1,), "a head has one layer"),
        "attention_bias": ((False,), "the projections have no bias"),
        "mlp_bias": ((False,), "the projections have no bias"),
        "tie_word_embeddings": ((False,), "the head's lm_head is its own or the target's"),
        "use_sliding_window": ((False,), "attention reaches the whole window"),
        "position_embedding_type": (("rope",), "positions are rotary"),
        **_ROPE_FIXED,
    },
)

_DENSE = "the head's MLP is dense"
LATENT_HEAD_KEYS = KeyTable(
    used=HEAD_KEYS.used
    | _names("q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim")
    - _names("num_key_value_heads head_dim"),
    without_effect={
        **HEAD_KEYS.without_effect,
        **_why("MLA has one latent for all heads", "num_key_value_heads head_dim qk_head_dim"),
        **_why(
            _DENSE,
            "moe_intermediate_size n_routed_experts num_experts_per_tok n_shared_experts moe_layer_freq "
            "n_group topk_group norm_topk_prob routed_scaling_factor scoring_func topk_method "
            "first_k_dense_replace",
        ),
        **_why("a head has no such module", "num_nextn_predict_layers num_mtp_layers"),
    },
    fixed={
        **HEAD_KEYS.fixed,
        "model_type": (("kimi_k2", "deepseek_v3"), "a head is one layer of these types"),
        "rope_interleave": ((True,), "rotary pairs are interleaved"),
    },
)

BLOCK_FLAG_KEYS = KeyTable(used=_names("mask_token_id target_layer_ids"))
BLOCK_HEAD_KEYS = KeyTable(
    used=_names(
        "architectures vocab_size hidden_size intermediate_size num_attention_heads num_key_value_heads "
        "head_dim num_hidden_layers rms_norm_eps rope_theta rope_scaling rope_parameters block_size "
        "dflash_config"
    ),
    without_effect={
        **_COMMON,
        **_why("the stored tensors show their type", "dtype torch_dtype"),
        **_why(_RECORD, "num_target_layers"),
        **_why("use_sliding_window switches them on", "sliding_window max_window_layers"),
        **_why("a draft reads a window of the context", "max_position_embeddings"),
        **_why(_STORED_HEAD, "tie_word_embeddings"),
    },
    fixed={
        **_COMMON_FIXED,
        "model_type": (("qwen3",), "layers of this type are run"),
        "hidden_act": (("silu",), "the MLPs are gated by silu"),
        "attention_bias": ((False,), "the projections have no bias"),
        "use_sliding_window": ((False,), "attention reaches the whole window"),
        "final_logit_softcapping": ((), "logits are not capped"),
        "embed_scale": ((1.0,), "embeddings are not scaled"),
        **_ROPE_FIXED,
    },
)

_NOTHING: tuple[Any, ...] = ({}, [])
COMPRESSED_TENSORS_KEYS = KeyTable(
    used=frozenset({"quant_method", "config_groups"}),
    without_effect={
        "ignore": _STORED,
        "global_compression_ratio": "it is a statistic",
        "version": _RECORD,
    },
    fixed={
        "format": (("pack-quantized",), "packed INT4 is the only format of this method that is read"),
        "quantization_status": (("compressed",), "the weights are stored compressed"),
        "kv_cache_scheme": (_NOTHING, "the KV cache is not quantised"),
        "sparsity_config": (_NOTHING, "weights are stored whole"),
        "transform_config": (_NOTHING, "no transform is applied to the activations"),
        "dequantize": ((False,), "INT4 weights stay packed"),
        "run_compressed": ((True,), "INT4 weights stay packed"),
    },
)
GROUP_KEYS = KeyTable(
    used=frozenset({"weights"}),
    without_effect={"targets": _STORED},
    fixed={
        "format": (("pack-quantized",), "packed INT4 is the only format of this method that is read"),
        "input_activations": ((), "activations are not quantised"),
        "output_activations": ((), "activations are not quantised"),
    },
)
INT4_KEYS = KeyTable(
    used=frozenset({"group_size"}),
    without_effect={
        "observer": _CALIBRATION,
        "observer_kwargs": _CALIBRATION,
        "zp_dtype": "symmetric groups have no zero point",
        "scale_dtype": "the stored scales show their type",
    },
    fixed={
        "num_bits": ((4,), "INT4 is the only packed type"),
        "type": (("int",), "INT4 is the only packed type"),
        "symmetric": ((True,), "zero points are not read"),
        "strategy": (("group",), "scales belong to groups of input features"),
        "dynamic": ((False,), "weights are quantised once"),
        "actorder": ((False, "weight", "static"), "columns are in their natural order, without g_idx"),
        "block_structure": ((), "scales belong to groups of input features"),
    },
)
FP8_KEYS = KeyTable(
    used=frozenset({"quant_method", "weight_block_size"}),
    without_effect={
        "ignored_layers": _STORED,
        "modules_to_not_convert": _STORED,
        "modules_to_convert": _STORED,
    },
    fixed={
        "fmt": (("e4m3",), "FP8 weights are read as e4m3"),
        "activation_scheme": (("dynamic",), "activations stay fp32, which is more exact than dynamic FP8"),
        "scale_fmt": (("float", "ue8m0"), "these scales multiply the weights"),
        "expert_dtype": (("fp8",), "experts are FP8 as all other matrices"),
        "dequantize": ((False, True), "weights are dequantised when they are loaded"),
    },
)
