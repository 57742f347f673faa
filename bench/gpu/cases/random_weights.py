"""Random tensors and INT4 experts, made on the device itself: hosts would take minutes for a layer."""

from __future__ import annotations

import torch

from libs.engine.kernels.gpu.expert_weights import ExpertWeights

_WORD_VALUES = 8
_NIBBLE_DEVIATION = 4.61  # of the whole numbers from -8 to 7


def normal(device: torch.device, *size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(size, device=device, dtype=dtype)


def random_int4(device: torch.device, n: int, rows: int, cols: int, group: int) -> ExpertWeights:
    """Experts whose products keep the size of their inputs. Every nibble is a valid weight.

    Scales differ by up to a factor of three. Padded columns have scale 0, as those of a checkpoint have.
    """
    block = _WORD_VALUES * group
    padded = -(-cols // block) * block
    limits = torch.iinfo(torch.int32)
    words = torch.randint(
        limits.min, limits.max, (n, rows, padded // _WORD_VALUES), dtype=torch.int32, device=device
    )
    scale = torch.rand(n, padded // group, rows, device=device, dtype=torch.bfloat16)
    scale = (scale + 0.5) * (cols**-0.5 / _NIBBLE_DEVIATION)
    scale[:, cols // group :] = 0
    return ExpertWeights(words, scale, rows, cols, group)
