"""The weights of one decoder layer, packed for the kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from libs.engine.kernels.interface import Packed


@dataclass(frozen=True, slots=True)
class Attention:
    """a_proj stacks q_a_proj (or q_proj when q_lora_rank is null) on kv_a_proj_with_mqa: one pass over x."""

    a_proj: Packed
    q_norm: torch.Tensor | None
    q_b: Packed | None
    kv_norm: torch.Tensor
    kv_b: Packed
    o_proj: Packed


@dataclass(frozen=True, slots=True)
class Layer:
    input_norm: torch.Tensor
    attention: Attention
    post_norm: torch.Tensor
    mlp: Packed  # for Kernels.moe in a layer of experts, else for Kernels.mlp
