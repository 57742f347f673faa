"""Runs the chain of an EAGLE-3 head in one call of the compiled kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from libs.engine.eagle.attention import GroupedAttention
from libs.engine.eagle.config import HeadConfig
from libs.engine.eagle.context import DraftContext
from libs.engine.kernels.interface import Packed
from libs.engine.kernels.native import NativeKernels
from libs.engine.kernels.native_types import DRAFT_CONTEXT, DRAFT_HEAD
from libs.engine.model_spec.rope import Rope


class NativeChain:
    """Drafts as `EagleHead` does by single operations, of heads with grouped attention."""

    def __init__(
        self,
        config: HeadConfig,
        kernels: NativeKernels,
        attention: GroupedAttention,
        *,
        norms: Sequence[torch.Tensor],
        embedding: torch.Tensor,
        target_ids: torch.Tensor,
        matrices: Sequence[Packed],
    ) -> None:
        """`norms`: input, hidden, post, last. `matrices`: o_proj, lm_head, MLP. `embedding`: fp32 or bf16."""
        o_proj, lm_head, mlp = matrices
        shape = attention.shape
        self._kernels = kernels
        self._rope: Rope = attention.rope
        self._keep = (attention, norms, embedding, target_ids, matrices)
        self._head = DRAFT_HEAD(
            config.hidden_size,
            shape.n_heads,
            shape.n_kv_heads,
            shape.head_dim,
            embedding.dtype == torch.bfloat16,
            config.norm_before_residual,
            config.norm_output,
            config.rms_norm_eps,
            config.softmax_scale,
            *(norm.data_ptr() for norm in norms),
            embedding.data_ptr(),
            target_ids.data_ptr(),
            attention.qkv.address,
            o_proj.address,
            lm_head.address,
            mlp.address,
        )

    def draft(
        self, contexts: Sequence[DraftContext], n_drafts: int, min_confidence: float
    ) -> list[list[int]]:
        """See `ContextHead.draft`."""
        tokens = torch.empty(len(contexts), n_drafts, dtype=torch.int64)
        ends = torch.tensor([context.end_position for context in contexts])
        angles = self._rope.cos_sin((ends[:, None] + torch.arange(n_drafts)).flatten())
        rows = (DRAFT_CONTEXT * len(contexts))()
        for i, context in enumerate(contexts):
            keys, values = context.view(0)
            newest = context.newest_row()
            rows[i] = DRAFT_CONTEXT(
                keys.data_ptr(),
                values.data_ptr(),
                keys.stride(0),
                context.n_rows,
                newest.residual.data_ptr(),
                newest.q.data_ptr(),
                angles[i * n_drafts].data_ptr(),
                tokens[i].data_ptr(),
            )
        self._kernels.draft_chain(
            ctypes.addressof(self._head), ctypes.addressof(rows), len(contexts), n_drafts, min_confidence
        )
        return [drafts[: row.n_tokens] for drafts, row in zip(tokens.tolist(), rows, strict=True)]
