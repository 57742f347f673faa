"""Loads the tensors of an EAGLE-3 head. Tensors that the head lacks come from the target model.

Names: `midlayer.*` or `layers.0.*`, `norm.weight`, `lm_head.weight`, `embed_tokens.weight`, `d2t`, each
with or without the prefix `model.`. No embedding -> the target's. No lm_head and a full draft
vocabulary -> the target's. No d2t -> draft ids are target ids. The target's engine uses `fc.weight` to fuse
the features; only training uses `t2d`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from libs.engine.eagle.config import HeadConfig
from libs.engine.model.checkpoint import Checkpoint
from libs.engine.model.shards import CheckpointError


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """All of one dtype; matrices [out, in] as stored, q|k|v and gate|up stacked by rows."""

    embedding: torch.Tensor  # [vocab, H]
    input_norm: torch.Tensor  # [H], of the token's embedding
    hidden_norm: torch.Tensor  # [H], of the feature
    qkv: torch.Tensor  # [(heads + 2 kv_heads) * head_dim, 2H]
    o_proj: torch.Tensor  # [H, heads * head_dim]
    post_norm: torch.Tensor  # [H]
    gate_up: torch.Tensor  # [2 * intermediate, H]
    down: torch.Tensor  # [H, intermediate]
    norm: torch.Tensor  # [H]
    lm_head: torch.Tensor  # [draft_vocab, H]
    target_ids: torch.Tensor  # [draft_vocab] i64: token id of each draft id


def load_head_weights(
    head_dir: Path, target_dir: Path, config: HeadConfig, *, dtype: torch.dtype = torch.float32
) -> HeadWeights:
    """Load a head's tensors. Raises CheckpointError naming the tensor that is missing or of a wrong shape."""
    c = config
    with Checkpoint(head_dir) as head, Checkpoint(target_dir) as target:
        names = _Names(head)

        def tensor(name: str, *shape: int) -> torch.Tensor:
            return head.dense(names.find(name), shape).to(dtype)

        inputs = 2 * c.hidden_size
        q_rows, kv_rows = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
        layer = names.layer
        attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        weights = HeadWeights(
            embedding=_embedding(head, names, target, c).to(dtype),
            input_norm=tensor(f"{layer}.input_layernorm.weight", c.hidden_size),
            hidden_norm=tensor(f"{layer}.hidden_norm.weight", c.hidden_size),
            qkv=torch.cat(
                [
                    tensor(f"{attention}.q_proj.weight", q_rows, inputs),
                    tensor(f"{attention}.k_proj.weight", kv_rows, inputs),
                    tensor(f"{attention}.v_proj.weight", kv_rows, inputs),
                ]
            ),
            o_proj=tensor(f"{attention}.o_proj.weight", c.hidden_size, q_rows),
            post_norm=tensor(f"{layer}.post_attention_layernorm.weight", c.hidden_size),
            gate_up=torch.cat(
                [
                    tensor(f"{mlp}.gate_proj.weight", c.intermediate_size, c.hidden_size),
                    tensor(f"{mlp}.up_proj.weight", c.intermediate_size, c.hidden_size),
                ]
            ),
            down=tensor(f"{mlp}.down_proj.weight", c.hidden_size, c.intermediate_size),
            norm=tensor("norm.weight", c.hidden_size),
            lm_head=_lm_head(head, names, target, c).to(dtype),
            target_ids=_target_ids(head, names, c),
        )
        names.refuse_others()
        return weights


class _Names:
    """The names of this head's tensors."""

    def __init__(self, head: Checkpoint) -> None:
        self._head = head
        self._known = {"fc.weight", "t2d"}
        self.layer = "midlayer" if self.find("midlayer.hidden_norm.weight") in head else "layers.0"

    def find(self, name: str) -> str:
        """`name` or `model.name`, whichever is stored; `name` when neither is."""
        self._known.add(name)
        prefixed = f"model.{name}"
        return prefixed if prefixed in self._head and name not in self._head else name

    def refuse_others(self) -> None:
        """Raise CheckpointError for a stored tensor that no part of the head uses."""
        for name in sorted(self._head.names()):
            if name.removeprefix("model.") not in self._known and not name.endswith(".rotary_emb.inv_freq"):
                raise CheckpointError(name, "unexpected: the head's config.json implies no such tensor")


def _embedding(head: Checkpoint, names: _Names, target: Checkpoint, c: HeadConfig) -> torch.Tensor:
    own = names.find("embed_tokens.weight")
    if own in head:
        return head.dense(own, (c.vocab_size, c.hidden_size))
    return target.dense(f"{target.text_prefix()}embed_tokens.weight", (c.vocab_size, c.hidden_size))


def _lm_head(head: Checkpoint, names: _Names, target: Checkpoint, c: HeadConfig) -> torch.Tensor:
    shape = (c.draft_vocab_size, c.hidden_size)
    own = names.find("lm_head.weight")
    if own in head:
        return head.dense(own, shape)
    if c.draft_vocab_size != c.vocab_size:
        raise CheckpointError("lm_head.weight", "not in the head, whose vocabulary is not the target's")
    shared = target.head_name() or f"{target.text_prefix()}embed_tokens.weight"
    return target.dense(shared, shape)


def _target_ids(head: Checkpoint, names: _Names, c: HeadConfig) -> torch.Tensor:
    ids = torch.arange(c.draft_vocab_size)
    stored = names.find("d2t")
    if stored in head:
        ids = ids + head.tensor(stored, (c.draft_vocab_size,)).long()
    elif c.draft_vocab_size != c.vocab_size:
        raise CheckpointError("d2t", "not in the head, whose vocabulary is not the target's")
    if int(ids.min()) < 0 or int(ids.max()) >= c.vocab_size:
        raise CheckpointError("d2t", f"has token ids outside the vocabulary of {c.vocab_size}")
    return ids
