"""The parts of a batch's plan that programs read, in the memory of a device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from libs.engine.model_spec.plan import BatchPlan
from libs.engine.step.batch import Int32Array


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """Tensors are int32 but for `cos_sin` and `is_padding`.

    page_of_row [T]          -1 = the row writes no KV
    query_start [S+1]        the first of each sequence's absorbed rows, among all absorbed rows
    page_table               of any strides
    absorbed, absorbed_rows  the sequences of that form, and their rows of the T
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
    n_rows = np.diff(plan.query_start)
    n_rows[plan.expanded] = 0

    def put(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, np.int32)).to(device, non_blocking=True)

    return DevicePlan(
        cos_sin=plan.cos_sin.to(device, non_blocking=True),
        page_of_row=put(plan.page_of_row),
        offset_of_row=put(plan.offset_of_row),
        query_start=put(np.concatenate(([0], np.cumsum(n_rows)))),
        context_len=put(plan.context_len),
        page_table=put(plan.page_table),
        absorbed=put(plan.absorbed),
        absorbed_rows=put(absorbed_rows(plan)),
    )


def absorbed_rows(plan: BatchPlan) -> Int32Array:
    """[A]: the rows of the absorbed sequences, in order."""
    is_absorbed = np.ones(len(plan.context_len), np.bool_)
    is_absorbed[plan.expanded] = False
    rows: Int32Array = np.flatnonzero(np.repeat(is_absorbed, np.diff(plan.query_start))).astype(np.int32)
    return rows
