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
from libs.engine.eagle.weights import HeadWeights, load_head_weights
from libs.engine.kernels.interface import Kernels
from libs.engine.model.checkpoint import weights_digest
from libs.engine.model_spec.matrix import DenseMatrix


@dataclass(frozen=True, slots=True)
class HeadInputs:
    """What `attend` needs of rows: residuals [T, H] and queries [T, n_heads, key_width]."""

    residual: torch.Tensor
    q: torch.Tensor

    def row(self, index: int) -> HeadInputs:
        """Row `index` alone, in memory that nothing else shares."""
        at = slice(index, index + 1)
        return HeadInputs(self.residual[at].clone(), self.q[at].clone())


def join_inputs(inputs: Sequence[HeadInputs]) -> HeadInputs:
    """The rows of all, in order."""
    if len(inputs) == 1:
        return inputs[0]
    return HeadInputs(torch.cat([i.residual for i in inputs]), torch.cat([i.q for i in inputs]))


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
