"""What the report consists of: sections with a budget of time, each of cases that give one figure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from bench.gpu.counting.work import KernelWork

Figure = dict[str, Any]


class NotMeasured(Exception):
    """A case cannot be measured here; the text is the reason."""


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the device was measured to do: a large copy, read and written, and a large bf16 product."""

    copy_bytes_per_s: float
    matmul_flops_per_s: float

    def floor_us(self, works: Iterable[KernelWork]) -> float:
        """The least time of operations after one another, each bound by its bytes or by its FLOPs."""
        return 1e6 * sum(
            max(w.n_bytes / self.copy_bytes_per_s, w.flops / self.matmul_flops_per_s) for w in works
        )

    def shares(self, work: KernelWork, taken_us: float) -> Figure:
        """Of the ceilings, that work in so much time has reached."""
        return {
            "n_bytes": work.n_bytes,
            "flops": work.flops,
            "copy_share": work.n_bytes / taken_us * 1e6 / self.copy_bytes_per_s,
            "matmul_share": work.flops / taken_us * 1e6 / self.matmul_flops_per_s,
        }


@dataclass(frozen=True, slots=True)
class Bench:
    """Where and how much is measured. `is_miniature`: tiny shapes, for the interpreter on a CPU."""

    device: torch.device
    repeats: int
    ceilings: Ceilings
    is_miniature: bool = False


@dataclass(frozen=True, slots=True)
class ReportCase:
    """`measure` allocates, measures and frees; it raises NotMeasured where something is missing."""

    name: str
    setting: str
    measure: Callable[[], Figure]


@dataclass(frozen=True, slots=True)
class ReportSection:
    """`cases` is cheap: it names cases, and allocates nothing."""

    name: str
    budget_s: float
    cases: Callable[[Bench], Iterable[ReportCase]]
