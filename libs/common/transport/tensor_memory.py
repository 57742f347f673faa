"""The memory of tensors, of the host and of CUDA devices, for `KvTransport.register`. Imports no torch.

A tensor is any object with an address, a length and a device.
"""

from __future__ import annotations

import re
from typing import Protocol, TypeGuard

HOST = "cpu"
_CUDA_DEVICE = re.compile(r"cuda:\d{1,3}")


class Device(Protocol):
    """The device of a tensor."""

    @property
    def type(self) -> str: ...

    @property
    def index(self) -> int | None: ...


class Tensor(Protocol):
    """The members of a torch tensor that the transport uses."""

    @property
    def nbytes(self) -> int: ...

    @property
    def device(self) -> Device: ...

    def data_ptr(self) -> int: ...

    def is_contiguous(self) -> bool: ...


def is_tensor(memory: object) -> TypeGuard[Tensor]:
    """Whether the object has the interface of a torch tensor."""
    return all(hasattr(memory, name) for name in ("data_ptr", "nbytes", "device", "is_contiguous"))


def tensor_extent(tensor: Tensor) -> tuple[int, int, str]:
    """Address, bytes and location ("cpu" or "cuda:N") of a tensor. Raises ValueError if not contiguous."""
    if not tensor.is_contiguous():
        raise ValueError("the tensor is not contiguous")
    device = tensor.device
    location = device.type if device.index is None or device.type == HOST else f"{device.type}:{device.index}"
    return tensor.data_ptr(), tensor.nbytes, location


def is_location(location: str) -> bool:
    """Whether any transport can register memory of this location."""
    return location == HOST or _CUDA_DEVICE.fullmatch(location) is not None
