"""Writes the trained network as a checkpoint in the public Kimi-K2 layout, and reads it back.

The checkpoint has sharded safetensors with an index, `config.json` and `generation_config.json`. Routed
experts are INT4 `pack-quantized` per expert, other tensors bf16, and the correction bias fp32. The tokenizer
files are already in the directory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from libs.text.special_tokens import BOS, EOS, IM_END, PAD
from libs.text.tokenizer import Tokenizer
from models.networks.architecture import Architecture
from models.networks.eagle_network import EagleShape, TrainableEagleHead
from models.networks.network import Network
from models.networks.quantize import dequantize, group_scales, pack, quantize, unpack

_SHARDS = 2
# Above 0.3 a model of this size begins to garble its shortest answers.
_TEMPERATURE = 0.2
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def checkpoint_tensors(network: Network) -> dict[str, Tensor]:
    """Every tensor of the checkpoint under its public name."""
    out: dict[str, Tensor] = {}
    for name, tensor in network.state_dict().items():
        public = name if name.startswith("lm_head.") else f"model.{name}"
        if ".experts." in name:
            out.update(_expert_tensors(public, tensor))
        elif name.endswith("e_score_correction_bias"):
            out[public] = tensor.float().contiguous()
        else:
            out[public] = tensor.bfloat16().contiguous()
    return out


def _expert_tensors(public: str, stacked: Tensor) -> dict[str, Tensor]:
    """Packs `...experts.gate_up` [E, 2I, H] or `...experts.down` [E, H, I] expert by expert."""
    prefix, _, kind = public.rpartition(".")
    out: dict[str, Tensor] = {}
    for e, matrix in enumerate(stacked):
        pairs = [("down_proj", matrix)]
        if kind == "gate_up":
            gate, up = matrix.chunk(2, dim=0)
            pairs = [("gate_proj", gate), ("up_proj", up)]
        for projection, weight in pairs:
            scale = group_scales(weight)
            name = f"{prefix}.{e}.{projection}"
            out[f"{name}.weight_packed"] = pack(quantize(weight, scale))
            out[f"{name}.weight_scale"] = scale.contiguous()
            out[f"{name}.weight_shape"] = torch.tensor(weight.shape, dtype=torch.int32)
    return out


def network_state(tensors: Mapping[str, Tensor], a: Architecture) -> dict[str, Tensor]:
    """The state of a `Network` from the checkpoint's tensors, experts dequantised; all fp32."""
    out: dict[str, Tensor] = {}
    for public, tensor in tensors.items():
        if ".experts." not in public:
            out[public.removeprefix("model.")] = tensor.float()
    for layer in range(a.first_k_dense_replace, a.num_hidden_layers):
        prefix = f"layers.{layer}.mlp.experts"
        experts = [
            {p: _dequantized(tensors, f"model.{prefix}.{e}.{p}") for p in _PROJECTIONS}
            for e in range(a.n_routed_experts)
        ]
        out[f"{prefix}.gate_up"] = torch.stack([torch.cat((e["gate_proj"], e["up_proj"])) for e in experts])
        out[f"{prefix}.down"] = torch.stack([e["down_proj"] for e in experts])
    return out


def _dequantized(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    cols = int(tensors[f"{name}.weight_shape"][1])
    q = unpack(tensors[f"{name}.weight_packed"], cols)
    return dequantize(q, tensors[f"{name}.weight_scale"]).float()


def write_model(network: Network, tokenizer: Tokenizer, model_dir: Path) -> None:
    """Write the checkpoint to `model_dir`, which has the tokenizer files."""
    tensors = checkpoint_tensors(network)
    weight_map: dict[str, str] = {}
    for shard, names in enumerate(_split(tensors)):
        file = f"model-{shard + 1:05d}-of-{_SHARDS:05d}.safetensors"
        save_file({name: tensors[name] for name in names}, model_dir / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(names, file))
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    ids = tokenizer.special_ids
    config = network.a.to_config(bos_token_id=ids[BOS], eos_token_id=ids[EOS], pad_token_id=ids[PAD])
    generation = {
        "eos_token_id": ids[IM_END],
        "max_length": network.a.max_position_embeddings,
        "temperature": _TEMPERATURE,
        "thinking": False,  # the training data has no reasoning
    }
    _write_json(model_dir / "model.safetensors.index.json", index)
    _write_json(model_dir / "config.json", config)
    _write_json(model_dir / "generation_config.json", generation)


def _split(tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """Names in their order, cut where about the same number of bytes lies on both sides."""
    sizes = {name: t.numel() * t.element_size() for name, t in tensors.items()}
    shards: list[list[str]] = [[] for _ in range(_SHARDS)]
    limit, done = sum(sizes.values()) / _SHARDS, 0
    for name, size in sizes.items():
        shards[min(int(done / limit), _SHARDS - 1)].append(name)
        done += size
    return shards


def load_network(model_dir: Path) -> Network:
    """The exported model, as a serving engine sees it: dequantised experts, bf16 values, in fp32."""
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    architecture = Architecture.from_config(config)
    index = json.loads((model_dir / "model.safetensors.index.json").read_text(encoding="utf-8"))
    tensors: dict[str, Tensor] = {}
    for file in sorted(set(index["weight_map"].values())):
        tensors.update(load_file(model_dir / file))
    network = Network(architecture)
    network.load_state_dict(network_state(tensors, architecture))
    return network.eval()


def write_head(head: TrainableEagleHead, tokenizer: Tokenizer, head_dir: Path) -> None:
    """Writes the draft head in the public Llama-type format; its vocabulary is the target's, in order."""
    head_dir.mkdir(parents=True, exist_ok=True)
    vocab = head.s.vocab_size
    tensors = {name: tensor.bfloat16().contiguous() for name, tensor in head.state_dict().items()}
    tensors["d2t"] = torch.zeros(vocab, dtype=torch.int64)
    tensors["t2d"] = torch.ones(vocab, dtype=torch.bool)
    save_file(tensors, head_dir / "model.safetensors", metadata={"format": "pt"})
    ids = tokenizer.special_ids
    config = head.s.to_config(bos_token_id=ids[BOS], eos_token_id=ids[EOS], pad_token_id=ids[PAD])
    _write_json(head_dir / "config.json", config)


def load_head(head_dir: Path) -> TrainableEagleHead:
    """Reads what `write_head` wrote, in fp32."""
    config = json.loads((head_dir / "config.json").read_text(encoding="utf-8"))
    tensors = load_file(head_dir / "model.safetensors")
    head = TrainableEagleHead(EagleShape.from_config(config))
    head.load_state_dict({name: t.float() for name, t in tensors.items() if name not in ("d2t", "t2d")})
    return head.eval()


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
