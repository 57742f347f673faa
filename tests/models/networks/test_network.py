"""The trainable network computes what transformers' DeepseekV3ForCausalLM computes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from models.networks.architecture import Architecture
from models.networks.network import Network

if TYPE_CHECKING:
    from transformers import DeepseekV3ForCausalLM

_TINY = Architecture(
    vocab_size=256,
    hidden_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=24,
    intermediate_size=128,
    moe_intermediate_size=32,
    original_max_position_embeddings=32,
    max_position_embeddings=128,
    rope_beta_fast=4.0,
)


def _randomised(a: Architecture) -> Network:
    """Return a network with bf16-exact weights, random norms and biases: defaults would hide errors."""
    torch.manual_seed(0)
    network = Network(a).eval()
    with torch.no_grad():
        for name, tensor in network.state_dict().items():
            noise = torch.randn(tensor.shape) * 0.1
            if name.endswith(("norm.weight", "correction_bias")):
                tensor.copy_((tensor + noise).bfloat16().float())
            else:
                tensor.copy_((tensor + noise * 0.1).bfloat16().float())
    return network


def _transformers(network: Network) -> DeepseekV3ForCausalLM:
    # Loaded where it is used: each process that collects the tests would load it, for seconds.
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    a = network.a
    config = a.to_config(bos_token_id=0, eos_token_id=1, pad_token_id=2)
    keep = set(DeepseekV3Config.__init__.__code__.co_varnames) | set(DeepseekV3Config().to_dict())
    chosen = {k: v for k, v in config.items() if k in keep and k not in ("model_type", "quantization_config")}
    rope = {k: v for k, v in config["rope_scaling"].items() if k != "type"}
    chosen["rope_parameters"] = {"rope_type": "yarn", "rope_theta": a.rope_theta, **rope}
    chosen["num_mtp_layers"] = 0
    chosen.pop("rope_scaling", None)
    chosen.pop("torch_dtype", None)
    chosen["attn_implementation"] = "eager"
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**chosen))
    model.train(False).float()
    state: dict[str, Tensor] = {}
    for name, tensor in network.state_dict().items():
        public = name if name.startswith("lm_head") else f"model.{name}"
        public = public.replace("experts.gate_up", "experts.gate_up_proj")
        public = public.replace("experts.down", "experts.down_proj") if "shared" not in public else public
        state[public] = tensor
    missing, unexpected = model.load_state_dict(state, strict=False)
    allowed = {"lm_head.weight"} if a.tie_word_embeddings else set()
    assert set(missing) <= allowed
    assert not unexpected
    model.tie_weights()
    return model


@pytest.mark.parametrize("q_lora_rank", [32, None])
@pytest.mark.parametrize("tied", [False, True])
def test_logits_equal_transformers(q_lora_rank: int | None, tied: bool) -> None:
    network = _randomised(replace(_TINY, q_lora_rank=q_lora_rank, tie_word_embeddings=tied))
    ids = torch.randint(0, 256, (2, 90), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours = network.logits(network(ids).hidden)
        theirs = _transformers(network)(ids).logits
    assert ours.std() > 0.1
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_streams_are_residual_streams() -> None:
    network = _randomised(_TINY)
    ids = torch.randint(0, 256, (1, 20), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        out = network(ids)
        states = _transformers(network)(ids, output_hidden_states=True).hidden_states
    assert len(out.streams) == _TINY.num_hidden_layers
    for stream, theirs in zip(out.streams[:-1], states[1:-1], strict=True):
        torch.testing.assert_close(stream, theirs, atol=1e-4, rtol=1e-4)


def test_rows_do_not_depend_on_later_tokens_or_other_rows() -> None:
    network = _randomised(_TINY)
    ids = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(3))
    changed = ids.clone()
    changed[0, 12:] = 7
    with torch.no_grad():
        before, after = network(ids).hidden, network(changed).hidden
    torch.testing.assert_close(before[0, :12], after[0, :12], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(before[1], after[1], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(before[0, 12:], after[0, 12:], atol=1e-3)
