"""Loads the tensors of an EAGLE-3 head. Tensors that the head lacks come from the target model.

Names: `midlayer.*` or `layers.0.*`, `norm.weight`, `lm_head.weight`, `embed_tokens.weight`, `d2t`, each
with or without the prefix `model.`. No embedding -> the target's. No lm_head and a full draft
vocabulary -> the target's. No d2t -> draft ids are target ids. The target's engine uses `fc.weight` and the
norms before it to fuse the features; only training uses `t2d`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from libs.engine.eagle.attention import GroupedWeights, LatentWeights
from libs.engine.eagle.config import GroupedShape, HeadConfig
from libs.engine.eagle.tensor_names import TensorNames
from libs.engine.kernels.interface import Kernels
from libs.engine.model.checkpoint import Checkpoint
from libs.engine.model.shards import CheckpointError


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """The weights in the dtypes of the files; matrices [out, in] as stored."""

    embedding: torch.Tensor  # [vocab, H]
    input_norm: torch.Tensor  # [H], of the token's embedding
    hidden_norm: torch.Tensor  # [H], of the feature
    attention: GroupedWeights | LatentWeights
    o_proj: torch.Tensor  # [H, heads * head_dim]
    post_norm: torch.Tensor  # [H]
    gate: torch.Tensor  # [intermediate, H]
    up: torch.Tensor  # [intermediate, H]
    down: torch.Tensor  # [H, intermediate]
    norm: torch.Tensor  # [H]
    lm_head: torch.Tensor  # [draft_vocab, H]
    target_ids: torch.Tensor  # [draft_vocab] i64: token id of each draft id


def load_head_weights(head_dir: Path, target_dir: Path, config: HeadConfig) -> HeadWeights:
    """Load a head's tensors. Raises CheckpointError naming the tensor that is missing or of a wrong shape."""
    c = config
    with Checkpoint(head_dir) as head, Checkpoint(target_dir) as target:
        names = TensorNames(head, ("fc.weight", "t2d"))

        def tensor(name: str, *shape: int) -> torch.Tensor:
            return head.dense(names.find(f"{name}.weight"), shape)

        layer = "midlayer" if names.find("midlayer.hidden_norm.weight") in head else "layers.0"
        mlp = f"{layer}.mlp"
        attention = _attention(tensor, f"{layer}.self_attn", c)
        for name in feature_norms(c):
            if names.find(name) not in head:
                raise CheckpointError(name, "not in the head, whose config.json implies it")
        weights = HeadWeights(
            embedding=_embedding(head, names, target, c),
            input_norm=tensor(f"{layer}.input_layernorm", c.hidden_size),
            hidden_norm=tensor(f"{layer}.hidden_norm", c.hidden_size),
            attention=attention,
            o_proj=tensor(f"{layer}.self_attn.o_proj", c.hidden_size, _mixed_width(c)),
            post_norm=tensor(f"{layer}.post_attention_layernorm", c.hidden_size),
            gate=tensor(f"{mlp}.gate_proj", c.intermediate_size, c.hidden_size),
            up=tensor(f"{mlp}.up_proj", c.intermediate_size, c.hidden_size),
            down=tensor(f"{mlp}.down_proj", c.hidden_size, c.intermediate_size),
            norm=tensor("norm", c.hidden_size),
            lm_head=_lm_head(head, names, target, c),
            target_ids=_target_ids(head, names, c),
        )
        names.refuse_others(but=".rotary_emb.inv_freq")
        return weights


def place_embedding(embedding: torch.Tensor, kernels: Kernels) -> torch.Tensor:
    """The embedding where kernels read it, in the dtype of activations where that is the smaller one."""
    if embedding.dtype.itemsize > kernels.dtype.itemsize:
        embedding = embedding.to(kernels.dtype)
    return kernels.place(embedding)


def _attention(
    tensor: Callable[..., torch.Tensor], name: str, config: HeadConfig
) -> GroupedWeights | LatentWeights:
    shape, inputs = config.attention, 2 * config.hidden_size
    if isinstance(shape, GroupedShape):
        q_rows, kv_rows = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
        return GroupedWeights(
            q=tensor(f"{name}.q_proj", q_rows, inputs),
            k=tensor(f"{name}.k_proj", kv_rows, inputs),
            v=tensor(f"{name}.v_proj", kv_rows, inputs),
        )
    q_rows = shape.n_heads * (shape.qk_nope_head_dim + shape.qk_rope_head_dim)
    lora, rank = shape.kv_lora_rank, shape.q_lora_rank
    return LatentWeights(
        q_a=None if rank is None else tensor(f"{name}.q_a_proj", rank, inputs),
        q_norm=None if rank is None else tensor(f"{name}.q_a_layernorm", rank),
        q_b=tensor(f"{name}.q_proj", q_rows, inputs)
        if rank is None
        else tensor(f"{name}.q_b_proj", q_rows, rank),
        kv_a=tensor(f"{name}.kv_a_proj_with_mqa", lora + shape.qk_rope_head_dim, inputs),
        kv_norm=tensor(f"{name}.kv_a_layernorm", lora),
        kv_b=tensor(f"{name}.kv_b_proj", shape.n_heads * (shape.qk_nope_head_dim + shape.v_head_dim), lora),
    )


def feature_norms(config: HeadConfig) -> list[str]:
    """The tensors that the target's engine needs beside `fc.weight`."""
    norms = [f"fc_norm.{slot}.weight" for slot in range(3)] if config.fc_norm else []
    return [*norms, "input_norm.weight"] if config.norm_before_fc else norms


def _mixed_width(config: HeadConfig) -> int:
    shape = config.attention
    return shape.n_heads * (shape.head_dim if isinstance(shape, GroupedShape) else shape.v_head_dim)


def _embedding(head: Checkpoint, names: TensorNames, target: Checkpoint, c: HeadConfig) -> torch.Tensor:
    own = names.find("embed_tokens.weight")
    if own in head:
        return head.dense(own, (c.vocab_size, c.hidden_size))
    return target.dense(f"{target.text_prefix()}embed_tokens.weight", (c.vocab_size, c.hidden_size))


def _lm_head(head: Checkpoint, names: TensorNames, target: Checkpoint, c: HeadConfig) -> torch.Tensor:
    shape = (c.draft_vocab_size, c.hidden_size)
    own = names.find("lm_head.weight")
    if own in head:
        return head.dense(own, shape)
    if c.draft_vocab_size != c.vocab_size:
        raise CheckpointError("lm_head.weight", "not in the head, whose vocabulary is not the target's")
    shared = target.head_name() or f"{target.text_prefix()}embed_tokens.weight"
    return target.dense(shared, shape)


def _target_ids(head: Checkpoint, names: TensorNames, c: HeadConfig) -> torch.Tensor:
    ids = torch.arange(c.draft_vocab_size)
    stored = names.find("d2t")
    if stored in head:
        ids = ids + head.tensor(stored, (c.draft_vocab_size,)).long()
    elif c.draft_vocab_size != c.vocab_size:
        raise CheckpointError("d2t", "not in the head, whose vocabulary is not the target's")
    if int(ids.min()) < 0 or int(ids.max()) >= c.vocab_size:
        raise CheckpointError("d2t", f"has token ids outside the vocabulary of {c.vocab_size}")
    return ids
