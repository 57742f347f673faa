"""The arithmetic of an EAGLE-3 head (SafeAILab EAGLE, `eagle/model/cnets.py`), for many sequences at once.

    step(h, token, position):
      a = [input_norm(embed(token)) | hidden_norm(h)]             2H values
      x = h + attention(a, position)                              h normed with norm_before_residual
      h' = x + mlp(post_norm(x))
      draft = target_ids[argmax lm_head(norm(h'))];  next h = h'  (norm(h') with norm_output)

With one layer the keys and values of a row depend only on its own inputs. So rows of the context need only
their projection, and attention runs only for the newest row of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from libs.engine.eagle.attention import ContextKv, ProjectedRows, make_attention
from libs.engine.eagle.config import HeadConfig, load_head_config
from libs.engine.eagle.context import DraftContext, HeadInputs, KvShape, join_inputs
from libs.engine.eagle.weights import HeadWeights, load_head_weights
from libs.engine.kernels.interface import Kernels
from libs.engine.model.checkpoint import weights_digest
from libs.engine.model_spec.matrix import DenseMatrix


@dataclass(frozen=True, slots=True)
class HeadOutputs:
    """One step of S sequences: next hidden states [S, H], drafted token ids [S], their probabilities [S]."""

    hidden: torch.Tensor
    tokens: torch.Tensor
    confidence: torch.Tensor


class EagleHead:
    """A loaded head, without state. `libs/engine/eagle/drafter.py` keeps the contexts."""

    def __init__(self, config: HeadConfig, weights: HeadWeights, kernels: Kernels, digest: str = "") -> None:
        self.config = config
        self.digest = digest  # hex, over the head's files
        self.attention = make_attention(config, weights.attention, kernels)
        self._kernels = kernels
        self._embedding, self._target_ids = weights.embedding, weights.target_ids
        self._input_norm, self._hidden_norm = weights.input_norm.float(), weights.hidden_norm.float()
        self._post_norm, self._norm = weights.post_norm.float(), weights.norm.float()
        self._o_proj, self._lm_head = (
            kernels.pack(DenseMatrix(weight)) for weight in (weights.o_proj, weights.lm_head)
        )
        gate, up, down = (DenseMatrix(weight) for weight in (weights.gate, weights.up, weights.down))
        self._mlp = kernels.pack_mlp((gate, up, down))

    @classmethod
    def load(cls, head_dir: Path, target_dir: Path, kernels: Kernels) -> EagleHead:
        """Load a head. Raises InvalidArgument or CheckpointError, naming the missing or unsupported part."""
        config = load_head_config(head_dir)
        return cls(config, load_head_weights(head_dir, target_dir, config), kernels, weights_digest(head_dir))

    def project(
        self, hidden: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor
    ) -> tuple[HeadInputs, ProjectedRows]:
        """Project rows: hidden [T, H] fp32, tokens [T] i64, positions [T] i64."""
        kernels, eps = self._kernels, self.config.rms_norm_eps
        normed = kernels.rms_norm(hidden, self._hidden_norm, eps)
        embedded = kernels.rms_norm(self._embedding[tokens].float(), self._input_norm, eps)
        rows = self.attention.project(torch.cat([embedded, normed], dim=-1), positions)
        return HeadInputs(normed if self.config.norm_before_residual else hidden, rows.q), rows

    def attend(self, inputs: HeadInputs, contexts: Sequence[ContextKv]) -> HeadOutputs:
        """Attend from one row of each sequence to its context, and draft the next token."""
        kernels, eps = self._kernels, self.config.rms_norm_eps
        mixed = self.attention.attend(inputs.q, contexts)
        hidden = kernels.linear(mixed, self._o_proj, inputs.residual.clone())
        hidden = kernels.mlp(kernels.rms_norm(hidden, self._post_norm, eps), self._mlp, hidden)
        normed = kernels.rms_norm(hidden, self._norm, eps)
        confidence, drafts = kernels.linear(normed, self._lm_head).softmax(dim=-1).max(dim=-1)
        next_hidden = normed if self.config.norm_output else hidden
        return HeadOutputs(next_hidden, self._target_ids[drafts], confidence)

    # ---- ContextHead

    @property
    def kv_shape(self) -> KvShape:
        """The shape of the attention's KV."""
        a = self.attention
        return KvShape(a.n_kv_heads, a.key_width, a.value_width, a.values_in_keys)

    def take_in(
        self, features: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor
    ) -> tuple[HeadInputs, ProjectedRows]:
        """See `project`."""
        return self.project(features, tokens, positions)

    def draft(
        self, contexts: Sequence[DraftContext], n_drafts: int, min_confidence: float
    ) -> list[list[int]]:
        """Draft by a chain, whose rows are temporary and follow each context's own rows."""
        drafts: list[list[int]] = [[] for _ in contexts]
        running, confidence = list(range(len(contexts))), [1.0] * len(contexts)
        inputs = join_inputs([c.newest_row() for c in contexts])
        for j in range(n_drafts):
            outputs = self.attend(inputs, [contexts[i].view(j) for i in running])
            hidden, tokens, likely = outputs.hidden, outputs.tokens, outputs.confidence.tolist()
            confidence = [whole * own for whole, own in zip(confidence, likely, strict=True)]
            kept = [at for at, whole in enumerate(confidence) if whole >= min_confidence]
            if len(kept) < len(running):
                hidden, tokens = hidden[kept], tokens[kept]
                running, confidence = [running[at] for at in kept], [confidence[at] for at in kept]
            for i, token in zip(running, tokens.tolist(), strict=True):
                drafts[i].append(token)
            if not running or j + 1 == n_drafts:
                break
            positions = torch.tensor([contexts[i].end_position + j for i in running])
            inputs, rows = self.project(hidden, tokens, positions)
            for at, i in enumerate(running):
                contexts[i].write_behind(j, rows.keys[at], rows.values[at])
        return drafts
