"""Draft features that stay on a device, for a head on the same one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

_HOST_VALUE_BYTES = 4


class DeviceRows:
    """Rows [n, width] with the length and slices of an array. Only `np.asarray` waits for the device."""

    __slots__ = ("tensor",)

    ndim = 2

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __len__(self) -> int:
        return int(self.tensor.shape[0])

    def __getitem__(self, rows: slice) -> DeviceRows:
        return DeviceRows(self.tensor[rows])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        values = self.tensor.float().cpu().numpy()
        return np.array(values, dtype, copy=copy)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self), int(self.tensor.shape[1])

    @property
    def nbytes(self) -> int:
        """The bytes of the rows as an array in the host."""
        return len(self) * self.shape[1] * _HOST_VALUE_BYTES


FeatureArray = npt.NDArray[np.float32] | DeviceRows


def host_rows(rows: FeatureArray) -> npt.NDArray[np.float32]:
    """The rows in the host, for readers elsewhere."""
    return np.asarray(rows, np.float32)


def own_rows(rows: FeatureArray) -> FeatureArray:
    """The rows in memory of their size, where they are on a device."""
    return DeviceRows(rows.tensor.clone()) if isinstance(rows, DeviceRows) else rows


def join_rows(parts: Sequence[FeatureArray]) -> FeatureArray:
    """The rows of all, in order: on the device where some are there, else in the host."""
    if len(parts) == 1:
        return parts[0]
    there = next((part for part in parts if isinstance(part, DeviceRows)), None)
    if there is None:
        return np.concatenate([host_rows(part) for part in parts])
    import torch

    return DeviceRows(torch.cat([_beside(part, there) for part in parts]))


def _beside(part: FeatureArray, there: DeviceRows) -> torch.Tensor:
    """Rows of the host are copied without a wait."""
    if isinstance(part, DeviceRows):
        return part.tensor
    import torch

    rows = torch.from_numpy(np.ascontiguousarray(part, np.float32))
    if there.tensor.is_cuda:
        rows = rows.pin_memory()
    return rows.to(there.tensor.device, there.tensor.dtype, non_blocking=True)
