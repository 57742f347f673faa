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

from libs.engine.eagle.attended import (
    AttendedRows,
    LoopedRows,
    attended_rows,
)
from libs.engine.eagle.attention import GroupedAttention, ProjectedRows, make_attention
from libs.engine.eagle.config import HeadConfig, load_head_config
from libs.engine.eagle.context import DraftContext, HeadInputs, join_inputs
from libs.engine.eagle.context_head import ContextHead
from libs.engine.eagle.drafted import read_drafts
from libs.engine.eagle.native_chain import NativeChain
from libs.engine.eagle.weights import HeadWeights, load_head_weights, place_embedding
from libs.engine.kernels.device import upload
from libs.engine.kernels.interface import Kernels
from libs.engine.kernels.native import NativeKernels
from libs.engine.model.checkpoint import weights_digest
from libs.engine.model_spec.matrix import DenseMatrix


@dataclass(frozen=True, slots=True)
class HeadOutputs:
    """One step of S sequences: next hidden states [S, H], drafted token ids [S], their probabilities [S]."""

    hidden: torch.Tensor
    tokens: torch.Tensor
    confidence: torch.Tensor


class EagleHead(ContextHead):
    """A loaded head of EAGLE-3."""

    config: HeadConfig

    def __init__(self, config: HeadConfig, weights: HeadWeights, kernels: Kernels, digest: str = "") -> None:
        super().__init__(kernels, digest)
        self.config = config
        self.attention = make_attention(config, weights.attention, kernels)
        self._embedding = place_embedding(weights.embedding, kernels)
        self._target_ids = kernels.place(weights.target_ids)
        self._input_norm, self._hidden_norm, self._post_norm, self._norm = (
            kernels.place(norm.float())
            for norm in (weights.input_norm, weights.hidden_norm, weights.post_norm, weights.norm)
        )
        self._o_proj, self._lm_head = (
            kernels.pack(DenseMatrix(weight)) for weight in (weights.o_proj, weights.lm_head)
        )
        gate, up, down = (DenseMatrix(weight) for weight in (weights.gate, weights.up, weights.down))
        self._mlp = kernels.pack_mlp((gate, up, down))
        self._native_chain = self._make_native_chain()

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
        residual = normed if self.config.norm_before_residual else hidden
        return HeadInputs(residual.float(), rows.q), rows

    def attend(self, inputs: HeadInputs, rows: AttendedRows, n_behind: int) -> HeadOutputs:
        """Attend from one row of each sequence to its context and `n_behind` rows; draft the next token."""
        kernels, eps = self._kernels, self.config.rms_norm_eps
        mixed = self.attention.attend(inputs.q, rows, n_behind)
        hidden = kernels.linear(mixed, self._o_proj, inputs.residual.clone())
        hidden = kernels.mlp(kernels.rms_norm(hidden, self._post_norm, eps), self._mlp, hidden)
        normed = kernels.rms_norm(hidden, self._norm, eps)
        confidence, drafts = kernels.logits(normed, self._lm_head).softmax(dim=-1).max(dim=-1)
        next_hidden = normed if self.config.norm_output else hidden
        return HeadOutputs(next_hidden, self._target_ids[drafts], confidence)

    # ---- ContextHead

    def project_rows(
        self, features: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor
    ) -> tuple[HeadInputs, ProjectedRows]:
        """See `project`."""
        return self.project(features, tokens, positions)

    def draft(
        self, contexts: Sequence[DraftContext], n_drafts: int, min_confidence: float
    ) -> list[list[int]]:
        """Draft by a chain, whose rows are temporary and follow each context's own rows."""
        if self._native_chain is not None:
            return self._native_chain.draft(contexts, n_drafts, min_confidence)
        if self.pads_contexts:
            rows = attended_rows(contexts, n_drafts, self._kernels)
            positions = upload(torch.tensor([c.end_position for c in contexts]), self._kernels.device)
            inputs = join_inputs([c.newest_row() for c in contexts])
            return read_drafts(*self.chain(rows, inputs, positions, n_drafts), min_confidence)
        return self.draft_by_steps(contexts, n_drafts, min_confidence)

    def chain(
        self, rows: AttendedRows, inputs: HeadInputs, positions: torch.Tensor, n_drafts: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and their probabilities [S, n_drafts], without a wait for the device."""
        tokens, likely = [], []
        for j in range(n_drafts):
            outputs = self.attend(inputs, rows, j)
            tokens.append(outputs.tokens)
            likely.append(outputs.confidence)
            if j + 1 < n_drafts:
                inputs, projected = self.project(outputs.hidden, outputs.tokens, positions + j)
                rows.write(j, projected.keys[:, None], projected.values[:, None])
        return torch.stack(tokens, dim=1), torch.stack(likely, dim=1)

    def _make_native_chain(self) -> NativeChain | None:
        """The chain in one call, where the kernels have it for this attention."""
        attention, kernels = self.attention, self._kernels
        if not isinstance(kernels, NativeKernels) or not isinstance(attention, GroupedAttention):
            return None
        return NativeChain(
            self.config,
            kernels,
            attention,
            norms=(self._input_norm, self._hidden_norm, self._post_norm, self._norm),
            embedding=self._embedding,
            target_ids=self._target_ids,
            matrices=(self._o_proj, self._lm_head, self._mlp),
        )

    def draft_by_steps(
        self, contexts: Sequence[DraftContext], n_drafts: int, min_confidence: float
    ) -> list[list[int]]:
        """By single operations. Each token is read: a sequence that is unsure computes no further."""
        drafts: list[list[int]] = [[] for _ in contexts]
        running, confidence = list(range(len(contexts))), [1.0] * len(contexts)
        inputs = join_inputs([c.newest_row() for c in contexts])
        for j in range(n_drafts):
            outputs = self.attend(inputs, LoopedRows([contexts[i] for i in running]), j)
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
            LoopedRows([contexts[i] for i in running]).write(j, rows.keys[:, None], rows.values[:, None])
        return drafts
