"""The parts of a batch's plan that programs read, in the memory of a device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from libs.engine.model_spec.plan import BatchPlan


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """Tensors are int32 but for `cos_sin` and `is_padding`.

    page_of_row [T]          -1 = the row writes no KV
    page_table               of any strides
    absorbed, absorbed_rows  the sequences of that form, and their rows
    is_padding [T] bool      rows that choose no expert, and whose results are dropped; None = no row does
    """

    cos_sin: torch.Tensor
    page_of_row: torch.Tensor
    offset_of_row: torch.Tensor
    query_start: torch.Tensor
    context_len: torch.Tensor
    page_table: torch.Tensor
    absorbed: torch.Tensor
    absorbed_rows: torch.Tensor
    is_padding: torch.Tensor | None = None


def upload(plan: BatchPlan, device: torch.device) -> DevicePlan:
    rows = [np.arange(plan.rows_of(s).start, plan.rows_of(s).stop) for s in plan.absorbed]

    def put(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, np.int32)).to(device, non_blocking=True)

    return DevicePlan(
        cos_sin=plan.cos_sin.to(device, non_blocking=True),
        page_of_row=put(plan.page_of_row),
        offset_of_row=put(plan.offset_of_row),
        query_start=put(plan.query_start),
        context_len=put(plan.context_len),
        page_table=put(plan.page_table),
        absorbed=put(plan.absorbed),
        absorbed_rows=put(np.concatenate(rows) if rows else np.zeros(0)),
    )
