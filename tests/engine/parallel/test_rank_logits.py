"""Logits of a group on devices, whose kernels round activations to bf16 and logits to nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from libs.engine.kernels.torch_kernels import TorchKernels
from libs.engine.parallel.rank_model import RankModel
from libs.engine.parallel.sizes import ParallelSizes

VOCAB_SIZE, WIDTH = 10, 4


class RoundingKernels(TorchKernels):
    """Gives activations of bf16, as the kernels of a device do."""

    def linear(self, x: torch.Tensor, weight: Any, residual: torch.Tensor | None = None) -> torch.Tensor:
        return super().linear(x, weight, residual).to(torch.bfloat16)

    def logits(self, x: torch.Tensor, weight: Any) -> torch.Tensor:
        return super().linear(x, weight)


class OneRank:
    def gather_columns(self, part: torch.Tensor, widths: list[int]) -> torch.Tensor:
        return part


def test_logits_of_a_rank_are_not_rounded_to_the_dtype_of_activations() -> None:
    generator = torch.Generator().manual_seed(1)
    x, head = (torch.randn(n, WIDTH, generator=generator) for n in (3, VOCAB_SIZE))
    rank: Any = SimpleNamespace(
        options=SimpleNamespace(sizes=ParallelSizes()),
        config=SimpleNamespace(vocab_size=VOCAB_SIZE, rms_norm_eps=1e-6),
        kernels=RoundingKernels(),
        _weights=SimpleNamespace(norm=torch.ones(WIDTH), head=head),
        _links=OneRank(),
    )
    logits = RankModel._logits(rank, x)
    assert logits is not None and logits.dtype == torch.float32
    assert torch.equal(logits, rank.kernels.logits(rank.kernels.rms_norm(x, torch.ones(WIDTH), 1e-6), head))
