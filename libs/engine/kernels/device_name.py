"""Names of devices: cpu, cuda and cuda:N. Without torch, so that settings are checked before it is loaded."""

from __future__ import annotations

import re

CPU = "cpu"
_CUDA = re.compile(r"cuda(?::(\d{1,3}))?")


def rank_device(name: str, rank: int) -> str:
    """The device of one rank of a group: the CPU, or as many CUDA devices behind the one with `name`."""
    first = cuda_index(name)
    return name if first is None else f"cuda:{first + rank}"


def cuda_index(name: str) -> int | None:
    """The number of a CUDA device; None for the CPU. Raises ValueError for another name."""
    if name == CPU:
        return None
    match = _CUDA.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!r} is not cpu, cuda or cuda:N")
    return int(match[1] or 0)
