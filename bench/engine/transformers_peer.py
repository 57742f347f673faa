"""transformers' DeepseekV3ForCausalLM on the same checkpoint: peer of the benchmark, oracle of tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bench.engine.peers.transformers_peer import time_decode_s, time_prefill_s
from libs.engine.model.checkpoint import Checkpoint
from libs.engine.model_spec.config import ModelConfig, load_config

if TYPE_CHECKING:  # its import takes seconds, so the functions do it
    from transformers import DeepseekV3Config


def load_transformers(model_dir: Path, dtype: torch.dtype, *, attention: str = "eager") -> Any:
    """The checkpoint as a transformers model in `dtype`, built from dequantised tensors, in eval mode.

    transformers does not register `kimi_k2`, and reads packed experts only with a further package.
    """
    from transformers import DeepseekV3ForCausalLM

    config = load_config(model_dir)
    with torch.device("meta"):
        settings = _transformers_config(model_dir, config)
        model: Any = DeepseekV3ForCausalLM._from_config(settings, dtype=dtype)
    with Checkpoint(model_dir) as checkpoint:
        state = {name: tensor.to(dtype) for name, tensor in _state(checkpoint, config).items()}
    for layer in range(config.n_layers):
        bias = f"model.layers.{layer}.mlp.gate.e_score_correction_bias"
        if bias in state:
            state[bias] = state[bias].float()
    model.set_attn_implementation(attention)
    model.load_state_dict(state, strict=False, assign=True)
    if config.tie_word_embeddings:
        model.tie_weights()
    _materialise(model)
    return model.eval()


def _transformers_config(model_dir: Path, config: ModelConfig) -> DeepseekV3Config:
    from transformers import DeepseekV3Config

    raw = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    text = dict(raw.get("text_config") or raw)
    # The keys as they are stated, so that the oracle reads them by itself.
    stated = text.get("rope_parameters") or text.get("rope_scaling") or {}
    rope = {"rope_type": "default", "rope_theta": config.rope_theta} | stated
    rope["rope_type"] = stated.get("rope_type") or stated.get("type") or "default"
    for key in (
        "rope_scaling",
        "rope_theta",
        "rope_parameters",
        "quantization_config",
        "model_type",
        "torch_dtype",
        "dtype",
    ):
        text.pop(key, None)
    return DeepseekV3Config(**text | {"rope_parameters": rope, "num_mtp_layers": 0})


def _state(checkpoint: Checkpoint, config: ModelConfig) -> dict[str, torch.Tensor]:
    """Names as transformers holds them in memory: the experts of a layer merged."""
    prefix, quantization = checkpoint.text_prefix(), config.quantization
    hidden = config.hidden_size
    state: dict[str, torch.Tensor] = {}
    for name in checkpoint.names():
        if name.startswith(prefix) and ".experts." not in name:
            state["model." + name.removeprefix(prefix)] = checkpoint.tensor(name)
    head = checkpoint.head_name()
    if head is not None:
        state["lm_head.weight"] = checkpoint.tensor(head)
    for layer in filter(config.is_moe, range(config.n_layers)):
        source, target = f"{prefix}layers.{layer}.mlp.experts", f"model.layers.{layer}.mlp.experts"
        gate_up, down = [], []
        for expert in range(config.n_routed_experts):
            width = config.moe_intermediate_size
            name = f"{source}.{expert}"
            gate = checkpoint.matrix(f"{name}.gate_proj", width, hidden, quantization).dequantised()
            up = checkpoint.matrix(f"{name}.up_proj", width, hidden, quantization).dequantised()
            gate_up.append(torch.cat((gate, up)))
            down.append(checkpoint.matrix(f"{name}.down_proj", hidden, width, quantization).dequantised())
        state[f"{target}.gate_up_proj"] = torch.stack(gate_up)
        state[f"{target}.down_proj"] = torch.stack(down)
    return state


def _materialise(model: Any) -> None:
    """Rotary frequencies are no part of a checkpoint: rebuild the module that holds them."""
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(model.config)
    left = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    left += [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if left:
        raise RuntimeError(f"not in the checkpoint: {left[:4]}")


class TransformersSubject:
    """Greedy generation over transformers' own cache, one forward pass a token, attention by SDPA."""

    name = "transformers"

    def __init__(self, model_dir: Path, dtype: torch.dtype, threads: int) -> None:
        self.torch_threads = threads
        self._model = load_transformers(model_dir, dtype, attention="sdpa")

    def prefill_s(self, prompt: np.ndarray, clock: Callable[[], float]) -> float:
        return time_prefill_s(self._model, torch.from_numpy(prompt).long()[None], clock)

    def decode_s(self, prompts: np.ndarray, output_tokens: int, clock: Callable[[], float]) -> float:
        return time_decode_s(self._model, torch.from_numpy(prompts).long(), output_tokens, clock)
