"""A block drafter (DFlash): all drafts of a block come from one pass, not from a chain.

    context: c = hidden_norm(feature); layer l has keys k_norm(k_proj(c)) and values v_proj(c)
    block:   x = embed([token, MASK, MASK, ...]) at the positions after the context
             x = x + attention(input_norm(x)); x = x + mlp(post_norm(x))   over context and block, not causal
             draft j = argmax lm_head(norm(x_j)), j >= 1

The context of all layers is one row of `n_layers * n_kv_heads` heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from libs.engine.eagle.attended import AttendedRows, attended_rows
from libs.engine.eagle.attention import ProjectedRows, interleaved
from libs.engine.eagle.block_config import BlockHeadConfig, parse_block_config
from libs.engine.eagle.context import DraftContext
from libs.engine.eagle.context_head import ContextHead
from libs.engine.eagle.drafted import read_drafts
from libs.engine.eagle.tensor_names import TensorNames
from libs.engine.eagle.weights import place_embedding
from libs.engine.kernels.device import upload
from libs.engine.kernels.interface import Kernels, Packed
from libs.engine.model.checkpoint import Checkpoint, weights_digest
from libs.engine.model_spec.config_json import read_config_json
from libs.engine.model_spec.matrix import DenseMatrix
from libs.engine.model_spec.rope import Rope


@dataclass(frozen=True, slots=True)
class _BlockLayer:
    input_norm: torch.Tensor
    q: Packed
    kv: Packed
    q_norm: torch.Tensor
    k_norm: torch.Tensor
    o: Packed
    post_norm: torch.Tensor
    mlp: Packed


class BlockHead(ContextHead):
    """A loaded block drafter."""

    config: BlockHeadConfig

    def __init__(self, head_dir: Path, target_dir: Path, kernels: Kernels) -> None:
        """Load it. Raises InvalidArgument or CheckpointError, naming the missing or unsupported part."""
        super().__init__(kernels, weights_digest(head_dir))
        self.config = parse_block_config(read_config_json(head_dir, "draft_model_dir"))
        self._rope = Rope(self.config, kernels.place)
        with Checkpoint(head_dir) as head, Checkpoint(target_dir) as target:
            tensors = _Tensors(head, self.config, kernels)
            self._hidden_norm = tensors.vector("hidden_norm", self.config.hidden_size)
            self._norm = tensors.vector("norm", self.config.hidden_size)
            self._layers = [tensors.layer(i) for i in range(self.config.n_layers)]
            embedding, lm_head = tensors.shared(target)
            self._embedding = place_embedding(embedding, kernels)
            self._lm_head = kernels.pack(DenseMatrix(lm_head))
            tensors.names.refuse_others()

    def project_rows(
        self, features: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor
    ) -> tuple[None, ProjectedRows]:
        """Keys and values of every layer. The tokens are in the features already."""
        normed = self._kernels.rms_norm(features, self._hidden_norm, self.config.rms_norm_eps)
        cos_sin = self._rope.cos_sin(positions)
        parts = [self._keys_values(layer, normed, cos_sin) for layer in self._layers]
        keys, values = (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
        return None, ProjectedRows(keys, keys, values)

    def draft(
        self, contexts: Sequence[DraftContext], n_drafts: int, min_confidence: float
    ) -> list[list[int]]:
        """One pass over the blocks of all contexts."""
        n_rows = min(n_drafts + 1, self.config.block_size)
        tokens = torch.full((len(contexts), n_rows), self.config.mask_token_id)
        tokens[:, 0] = torch.tensor([context.last_token for context in contexts])
        starts = torch.tensor([context.end_position for context in contexts])
        positions = starts[:, None] + torch.arange(n_rows)
        rows = attended_rows(contexts, n_rows, self._kernels)
        tokens, positions = (upload(each, self.device) for each in (tokens, positions))
        return read_drafts(*self.block(tokens, positions, rows), min_confidence)

    def block(
        self, tokens: torch.Tensor, positions: torch.Tensor, rows: AttendedRows
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Drafts and their probabilities [S, R - 1] of blocks [S, R], without a wait for the device."""
        c, kernels = self.config, self._kernels
        cos_sin = self._rope.cos_sin(positions.flatten())
        x = self._embedding[tokens.flatten()].float()
        for index, layer in enumerate(self._layers):
            x = self._run_layer(index, layer, x, cos_sin, rows, tokens.shape[1])
        x = x.view(*tokens.shape, -1)[:, 1:].reshape(-1, c.hidden_size)
        logits = kernels.logits(kernels.rms_norm(x, self._norm, c.rms_norm_eps), self._lm_head)
        likely, drafts = logits.softmax(dim=-1).max(dim=-1)
        shape = (tokens.shape[0], tokens.shape[1] - 1)
        return drafts.view(shape), likely.view(shape)

    def _run_layer(
        self,
        index: int,
        layer: _BlockLayer,
        x: torch.Tensor,
        cos_sin: torch.Tensor,
        rows: AttendedRows,
        n_rows: int,
    ) -> torch.Tensor:
        """`n_rows`: of each block."""
        c, kernels = self.config, self._kernels
        normed = kernels.rms_norm(x, layer.input_norm, c.rms_norm_eps)
        q = self._heads(kernels.linear(normed, layer.q), layer.q_norm, cos_sin)
        keys, values = self._keys_values(layer, normed, cos_sin)
        own = slice(index * c.n_kv_heads, (index + 1) * c.n_kv_heads)
        q, keys, values = (part.view(-1, n_rows, *part.shape[1:]) for part in (q, keys, values))
        rows.write(0, keys, values, own)
        mixed = rows.mix(q, n_rows, scale=c.head_dim**-0.5, heads=own)
        x = kernels.linear(mixed.flatten(2).flatten(0, 1), layer.o, x.clone())
        return kernels.mlp(kernels.rms_norm(x, layer.post_norm, c.rms_norm_eps), layer.mlp, x)

    def _keys_values(
        self, layer: _BlockLayer, x: torch.Tensor, cos_sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, H] -> keys and values [T, n_kv_heads, D]."""
        width = self.config.n_kv_heads * self.config.head_dim
        rows = self._kernels.linear(x, layer.kv)
        values = rows[:, width:].reshape(len(x), -1, self.config.head_dim)
        return self._heads(rows[:, :width], layer.k_norm, cos_sin), values

    def _heads(self, rows: torch.Tensor, norm: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
        """[T, heads * D] -> [T, heads, D], each head normed and rotated."""
        c = self.config
        flat = rows.reshape(-1, c.head_dim)
        heads = self._kernels.rms_norm(flat, norm, c.rms_norm_eps).view(len(rows), -1, c.head_dim)
        self._kernels.rotate_queries(heads, c.head_dim, cos_sin)
        return heads


class _Tensors:
    """Reads the tensors of a block drafter, with or without the prefix `model.`."""

    def __init__(self, head: Checkpoint, config: BlockHeadConfig, kernels: Kernels) -> None:
        self._head, self._config, self._kernels = head, config, kernels
        self.names = TensorNames(head, ("fc.weight",))

    def vector(self, name: str, width: int) -> torch.Tensor:
        return self._kernels.place(self._tensor(name, width).float())

    def layer(self, index: int) -> _BlockLayer:
        c, pack, name = self._config, self._kernels.pack, f"layers.{index}"
        attention, q_rows, kv_rows = f"{name}.self_attn", c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
        q = self._tensor(f"{attention}.q_proj", q_rows, c.hidden_size)
        k = self._tensor(f"{attention}.k_proj", kv_rows, c.hidden_size)
        v = self._tensor(f"{attention}.v_proj", kv_rows, c.hidden_size)
        norms = [self.vector(f"{attention}.{which}_norm", c.head_dim) for which in "qk"]
        # The kernels rotate neighbours: see GroupedAttention.
        q_norm, k_norm = (interleaved(norm[:, None], c.head_dim)[:, 0].contiguous() for norm in norms)
        mlp = [
            DenseMatrix(self._tensor(f"{name}.mlp.gate_proj", c.intermediate_size, c.hidden_size)),
            DenseMatrix(self._tensor(f"{name}.mlp.up_proj", c.intermediate_size, c.hidden_size)),
            DenseMatrix(self._tensor(f"{name}.mlp.down_proj", c.hidden_size, c.intermediate_size)),
        ]
        return _BlockLayer(
            input_norm=self.vector(f"{name}.input_layernorm", c.hidden_size),
            q=pack(DenseMatrix(interleaved(q, c.head_dim))),
            kv=pack(DenseMatrix(torch.cat([interleaved(k, c.head_dim), v]))),
            q_norm=q_norm,
            k_norm=k_norm,
            o=pack(DenseMatrix(self._tensor(f"{attention}.o_proj", c.hidden_size, q_rows))),
            post_norm=self.vector(f"{name}.post_attention_layernorm", c.hidden_size),
            mlp=self._kernels.pack_mlp((mlp[0], mlp[1], mlp[2])),
        )

    def shared(self, target: Checkpoint) -> tuple[torch.Tensor, torch.Tensor]:
        """Embedding and lm_head, the target's where the head has none."""
        shape = (self._config.vocab_size, self._config.hidden_size)
        theirs = f"{target.text_prefix()}embed_tokens.weight"
        own = [self.names.find(f"{name}.weight") for name in ("embed_tokens", "lm_head")]
        embedding, lm_head = (self._head.dense(name, shape) if name in self._head else None for name in own)
        return (
            target.dense(theirs, shape) if embedding is None else embedding,
            target.dense(target.head_name() or theirs, shape) if lm_head is None else lm_head,
        )

    def _tensor(self, name: str, *shape: int) -> torch.Tensor:
        return self._head.dense(self.names.find(f"{name}.weight"), shape)
